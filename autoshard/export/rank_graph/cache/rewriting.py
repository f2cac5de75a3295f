"""with_cache: a graph of whole sequences becomes one that continues them.

    before                                          after
    %t: i64[b,s]                                    %t: i64[b,s]
    %0: i64[s] = arange(0, s, 1)                    %past: i32[b]
    %1: i64[1,s] = unsqueeze(%0, 0)                 %kc: f32[b,2,64,16]    %vc: f32[b,2,64,16]
    ...                                             %0: i64[b,s] = past + arange(0, s, 1)
    %5: f32[b,8,s,16] = attention(%q, %k, %v,       ...
        causal="upper_left", scale=0.25)            %3 = update_cache(%kc, %k, %past)
                                                    %4 = update_cache(%vc, %v, %past)
                                                    %5: f32[b,8,s,16] = attention(%q, %3, %4,
                                                        lengths=past + s, causal="lower_right",
                                                        scale=0.25)
                                                    return (..., %3, %4)

One graph serves the prompt (past = 0) and every later token, of rows of different lengths: a
shorter prompt is filled up behind its end, and the next token overwrites what was filled in.

That is right where attention alone looks from one token at others. Each operator that reads an
input is checked to compute a token from the same token (carrying.py), and what the position of a
token decides is looked up by its position (tables.py); every other graph is refused, with the line
of the operator that looks further.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autoshard.export.errors import export_error
from autoshard.export.rank_graph.attention_forms import CachedMasks, Sight, is_expanded
from autoshard.export.rank_graph.cache.carrying import Carrier
from autoshard.export.rank_graph.cache.tables import PositionTable, Tables
from autoshard.export.rank_graph.core_operators import POINTWISE
from autoshard.export.rank_graph.evaluation import (
    PRIMES,
    Mixed,
    Place,
    Places,
    found_in,
    reads,
    shape_of,
    symbol_of,
)
from autoshard.export.rank_graph.graph import add_input, call_like, inputs_of
from autoshard.export.rank_graph.operators import LOWER_RIGHT, NONE, attention, update_cache
from autoshard.export.rank_graph.tidy import propagate
from autoshard.passes import Context, Pass, Report
from autoshard.runtime.graph_meta import ROLE, SIGHT

aten = torch.ops.aten

LENGTHS = "past_lengths"


@dataclass(frozen=True)
class WithCache(Pass):
    """See the module's text. sizes: the name of each symbol. max_length: tokens a cache holds."""

    sizes: Mapping[str, str]
    max_length: int

    def rewrite(self, gm: fx.GraphModule, ctx: Context, report: Report) -> None:
        """Rewrite `gm.graph` in place, whose first input has the tokens, [batch, sequence].

        Raises ExportError for attention that is not causal over the sequence, and for any other
        operator that computes a token from others or from the length.
        """
        graph = gm.graph
        given = inputs_of(graph)
        nodes = graph.find_nodes(op="call_function", target=attention)
        if not nodes:
            raise export_error(
                "the model has no attention, whose keys and values a cache holds; the state of a "
                "state-space model is in none",
                remedy="Export without a cache (no max_length), or a Hugging Face directory.",
            )
        symbol = symbol_of(self.sizes, "sequence")
        if symbol is None:
            raise export_error(
                "a key-value cache needs a sequence of any length, and this has one length only",
                remedy="Give dynamic={'sequence': (1, longest, longest)}.",
            )
        cached = []
        for node in nodes:
            if reads(node.args[1], symbol):
                _check(node, given[0].meta["val"].shape[1])
                cached.append(node)
            else:
                report.skip(node, "it attends to what no token of the sequence decides")
        tables = Tables(graph, self.sizes, set(given), self.max_length)
        batch = _carried(tables, given)
        lengths = _caches(graph, given[0], cached, self.max_length)
        try:
            Lookups(tables, batch, given[0], lengths).write()
        except Mixed as mixed:
            raise _refusal(mixed, None) from None
        report.hits += len(cached)
        propagate(graph)


def _check(node: fx.Node, sequence: Any) -> None:
    sight: Sight | None = node.meta.get(SIGHT)
    query, key = (n.meta["val"] for n in node.args[:2])  # type: ignore[union-attr]
    if sight is None or not sight.causal:
        raise export_error(
            "a key-value cache needs attention that is causal (within a window, or with a bias of "
            "each key or of each distance to it), and this has another mask",
            node,
            "Export without a cache (no max_length).",
        )
    if str(query.shape[2]) != str(sequence) or str(key.shape[2]) != str(sequence):
        raise export_error(
            f"a key-value cache needs attention over the sequence, and this is over "
            f"{query.shape[2]} x {key.shape[2]} tokens",
            node,
        )


def _carried(tables: Tables, given: list[fx.Node]) -> Places:
    """The place of the batch in every value that an input decides, where it is known. Raises
    ExportError where a value at one token depends on other tokens."""
    symbols = {name: symbol for symbol, name in tables.sizes.items()}
    rows = given[0].meta["val"].shape[0]
    rows = PRIMES["batch"] if "batch" in symbols else int(rows)
    places: Places = {}
    batches: Places = {}
    for node in given:
        dims = dict(enumerate(shape_of(node, tables.primes)[:2]))
        places[node] = Place(1) if dims.get(1) == PRIMES["sequence"] else None
        batches[node] = Place(0) if dims.get(0) == rows else None

    def place(node: fx.Node) -> Place | None:
        return tables.place(node) if node in tables else places.get(node)

    def batch_of(node: fx.Node) -> Place | None:
        if node in tables and "batch" in symbols:
            return found_in(shape_of(node, tables.primes), rows)
        return batches.get(node)

    along = Carrier(tables.primes, PRIMES["sequence"], tables.sequence, place)
    across = Carrier(tables.primes, rows, symbols.get("batch"), batch_of)
    for node in tables.graph.nodes:
        if node.op == "output":
            for i, result in enumerate(node.args[0]):  # type: ignore[arg-type]
                if result in tables:
                    raise export_error(f"output {i} of the model is the length's alone", result)
        if node.op != "call_function" or node not in tables.of_input:
            continue
        try:
            places[node] = along.result(node)
        except Mixed as mixed:
            raise _refusal(mixed, node) from None
        try:
            batches[node] = across.result(node)
        except Mixed:
            batches[node] = None  # the rows of a batch may meet: the cache keeps them in order
    return batches


def _refusal(mixed: Mixed, node: fx.Node | None) -> Exception:
    where = mixed.node or node
    remedy = "Export without a cache (no max_length)."
    given = [] if where is None else where.graph.find_nodes(op="placeholder")
    if any(getattr(n.meta.get("val"), "dtype", None) == torch.float16 for n in given):
        remedy = (
            "Export without a cache (no max_length), or with dtype='bfloat16' where the model does "
            "this in float16 alone, as T5 does against overflow."
        )
    return export_error(
        "a key-value cache needs every operator but attention to compute each token by itself, "
        f"and this {mixed}",
        where,
        remedy,
    )


def _caches(graph: fx.Graph, ids: fx.Node, nodes: list[fx.Node], max_length: int) -> fx.Node:
    """Inputs and outputs for the keys and values of each attention; the input of the past
    lengths."""
    batch = ids.meta["val"].shape[0]
    last = lengths = add_input(ids, LENGTHS, (batch,), torch.int32, **{ROLE: "lengths"})
    caches = []
    for i, node in enumerate(nodes):
        pair = []
        for kind, operand in zip(("key", "value"), node.args[1:3]):
            val = operand.meta["val"]  # type: ignore[union-attr]
            shape = (batch, val.shape[1], max_length, val.shape[3])
            role = f"{kind}_cache"
            last = add_input(last, f"{role}_{i}", shape, val.dtype, **{ROLE: role})
            pair.append(last)
        caches.append(pair)
    with graph.inserting_before(_first_call(graph)):
        size = graph.call_function(aten.sym_size.int, (ids, 1))
        total = graph.call_function(aten.add.Tensor, (lengths, size))
    masks = CachedMasks(lengths, size, max_length)
    results = []
    for node, pair in zip(nodes, caches):
        operands = []
        with graph.inserting_before(node):
            for cache, operand in zip(pair, node.args[1:3]):
                operands.append(call_like(node, update_cache, cache, operand, lengths))
        if node.meta[SIGHT].plain and not is_expanded(node):
            node.args = (node.args[0], *operands, None, total)
            node.kwargs = {**node.kwargs, "causal": LOWER_RIGHT}
        else:
            node.args = (node.args[0], *operands, masks.of(node, node.meta[SIGHT]))
            node.kwargs = {**node.kwargs, "causal": NONE}
        results += operands
    output = graph.output_node()
    output.args = ((*output.args[0], *results),)  # type: ignore[misc]
    return lengths


def _first_call(graph: fx.Graph) -> fx.Node:
    return next(n for n in graph.nodes if n.op != "placeholder")


_BROADCAST = frozenset((*POINTWISE, aten.matmul.default, aten.addmm.default))


class Lookups:
    """The lookups of a graph with a cache. batches: where the batch lies in each value that an
    input decides. lengths: how many tokens of each row are cached, int32 [batch]."""

    def __init__(self, tables: Tables, batches: Places, tokens: fx.Node, lengths: fx.Node) -> None:
        self.tables, self.batches, self.graph = tables, batches, tables.graph
        extent = tokens.meta["val"].shape[0]
        with self.graph.inserting_before(_first_call(self.graph)):
            self.size = self._call(aten.sym_size.int, tokens, 1)
            self.rows = (
                extent if isinstance(extent, int) else self._call(aten.sym_size.int, tokens, 0)
            )
            steps = self._call(aten.arange.start_step, 0, self.size, 1, dtype=torch.int64)
            start = self._call(aten._to_copy.default, lengths, dtype=torch.int64)
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
        shape = shape_of(node, self.tables.primes)
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

    def _call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return self.graph.call_function(target, args, kwargs)
