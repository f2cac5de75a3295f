"""Tables looked up by the positions of a call's tokens, in the shape that their reader expects."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autoshard.export.rank_graph.cache.axes import PRIMES, Mixed, Places
from autoshard.export.rank_graph.cache.tables import PositionTable, Tables
from autoshard.export.rank_graph.core_operators import POINTWISE

aten = torch.ops.aten

_BROADCAST = frozenset((*POINTWISE, aten.matmul.default, aten.addmm.default))


class Lookups:
    """The lookups of a graph with a cache. batches: where the batch lies in each value that an
    input decides. lengths: how many tokens of each row are cached, int32 [batch]."""

    def __init__(self, tables: Tables, batches: Places, tokens: fx.Node, lengths: fx.Node) -> None:
        self.tables, self.batches, self.graph = tables, batches, tables.graph
        extent = tokens.meta["val"].shape[0]
        first = next(n for n in self.graph.nodes if n.op != "placeholder")
        with self.graph.inserting_before(first):
            self.size = self._call(aten.sym_size.int, tokens, 1)
            self.rows = (
                extent if isinstance(extent, int) else self._call(aten.sym_size.int, tokens, 0)
            )
            steps = self.graph.call_function(
                aten.arange.start_step, (0, self.size, 1), {"dtype": torch.int64}
            )
            start = self.graph.call_function(
                aten._to_copy.default, (lengths,), {"dtype": torch.int64}
            )
            column = self._call(aten.unsqueeze.default, start, 1)
            self.positions = self._call(aten.add.Tensor, column, steps)
        self._found: dict[Any, fx.Node] = {}
        self._made: dict[Any, fx.Node] = {}

    def write(self) -> None:
        """Replace each table that a value of an input is computed with. Raises Mixed."""
        for reader in list(self.graph.nodes):
            if reader not in self.tables.of_input or reader.op != "call_function":
                continue
            for node in dict.fromkeys(reader.all_input_nodes):
                if node in self.tables:
                    try:
                        reader.replace_input_with(node, self._lookup(node, reader))
                    except Mixed as mixed:
                        mixed.node = mixed.node or node
                        raise

    def _lookup(self, node: fx.Node, reader: fx.Node) -> fx.Node:
        """The value of `node` at the positions of each row, as `reader` is to read it."""
        rank = node.meta["val"].dim()
        shape = self.tables.primes.shape(node)
        own = [dim for dim, size in enumerate(shape) if size % PRIMES["batch"] == 0]
        place = self.tables.place(node)
        joined = place is not None and own == [place.dim]
        wanted = own[0] if own and not joined else None
        added = 0
        if not own and self.rows != 1:
            batch = self.batches.get(reader)
            if batch is None or not batch.alone:
                raise Mixed("is read where the rows of the batch cannot be told apart")
            wide = reader.meta["val"].dim() if reader.target in _BROADCAST else rank
            wanted = batch.dim - (wide - rank)
            if wanted < 0:
                added, wanted = -wanted, 0
            if reader.target is aten.matmul.default and batch.dim >= wide - 2:
                raise Mixed("is multiplied by the rows of the batch")
        key = (node, wanted, added)
        if key not in self._made:
            table = self.tables.table(node, None if added else wanted)
            self._made[key] = self._shaped(table, node, joined, wanted, added)
        return self._made[key]

    def _shaped(
        self, table: PositionTable, node: fx.Node, joined: bool, batch: int | None, added: int
    ) -> fx.Node:
        """Rows of a table with the tokens in its own dim, and the batch in dim `batch` of the
        value, before which `added` dims are put; or joined with the tokens in one dim."""
        shape = [1] * added + table.shape
        dim = table.dim + added
        taken = {dim} if batch is None else {dim, batch}
        others = [d for d in range(len(shape)) if d not in taken]
        with self.graph.inserting_before(node):
            made = self._rows(table, node)
            order = [dim, *others] if batch is None else [batch, dim, *others]
            if batch is None or len(others) != int(table.node is not None):
                lead = [-1 if joined else self.size] if batch is None else [self.rows, self.size]
                sizes = [*lead, *(shape[d] for d in others)]
                made = self._call(aten.reshape.default, made, sizes)
            back = [order.index(d) for d in range(len(shape))]
            if back != sorted(back):
                made = self._call(aten.permute.default, made, back)
        if made is not self.positions:
            made.meta = {k: v for k, v in node.meta.items() if k != "val"}
        return made

    def _rows(self, table: PositionTable, node: fx.Node) -> fx.Node:
        """[batch, sequence, others], or the numbers themselves, [batch, sequence]."""
        positions = self.positions
        if table.start:
            positions = self._shared(aten.add.Tensor, positions, table.start)
        if table.node is None:
            return positions
        if table.node.op == "placeholder":
            return self._shared(aten.embedding.default, table.node, positions)
        return self._call(aten.embedding.default, table.node, positions)

    def _shared(self, target: Any, *args: Any) -> fx.Node:
        """One node for all readers, before the first: its operands are there from the start."""
        if (target, args) not in self._found:
            last = next((a for a in args if a in self._found.values()), self.positions)
            with self.graph.inserting_after(last):
                self._found[target, args] = self._call(target, *args)
        return self._found[target, args]

    def _call(self, target: Any, *args: Any) -> fx.Node:
        return self.graph.call_function(target, args)
