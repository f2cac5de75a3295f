"""Values that no input decides, such as positions and what is made of them, as tables.

    before                                     after
    %0: i64[s] = arange(0, s, 1)               %t: f32[64,8] = constant, row i for position i
    %1: f32[s,8] = ... mul, cos ...            %p: i64[b,s] = past + arange(0, s, 1)
    %2: f32[b,s,8] = mul(%x, %1)               %1: f32[b,s,8] = embedding(%t, %p)
                                               %2: f32[b,s,8] = mul(%x, %1)

A value that sizes alone decide is computed here, for as many tokens as the cache holds; it is a
table where fewer tokens make its first rows. A value that parameters decide too, a slice of a
parameter or a lookup in one, is computed in the graph for as many tokens as the cache holds.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autoshard.export.errors import export_error
from autoshard.export.rank_graph.cache.carrying import Carrier
from autoshard.export.rank_graph.evaluation import (
    PRIMES,
    Mixed,
    Place,
    computed,
    found_in,
    is_known,
    numbers_of,
    reads,
    shape_of,
    size_of,
)
from autoshard.export.rank_graph.graph import Constants, call_like
from autoshard.planning import arguments, reached

aten = torch.ops.aten

_TRIED = (2, 7)
"""Lengths whose values must be the first rows of the table, beside one less than the longest."""


@dataclass
class PositionTable:
    """A value for as many tokens as the cache holds: row i + start of `node`, [rows, others], for
    position i; where `node` is None, the number i + start. shape: of the value; dim: of its tokens.
    """

    node: fx.Node | None
    start: int
    shape: list[int]
    dim: int


class Tables:
    """The values of a graph that the sequence decides and no input does.

    sizes: the name of each symbol. inputs: the placeholders of the caller. length: tokens the
    cache holds.
    """

    def __init__(
        self,
        graph: fx.Graph,
        sizes: Mapping[str, str],
        inputs: set[fx.Node],
        length: int,
    ) -> None:
        self.graph, self.sizes, self.length = graph, sizes, length
        self._constants = Constants(graph, "table")
        (self.sequence,) = [symbol for symbol, name in sizes.items() if name == "sequence"]
        self.primes = numbers_of(sizes, **PRIMES)
        self._longest = numbers_of(sizes, 1, length)
        self.of_input = reached(
            inputs, lambda node: [u for u in node.users if u.target is not aten.sym_size.int]
        )
        made = (node for node in graph.nodes if node.op == "call_function")
        self._moving = reached(
            (node for node in made if reads(node, self.sequence)), lambda node: node.users
        )
        self._known: dict[tuple[int, int], dict[fx.Node, Any]] = {}
        self._places: dict[fx.Node, Place | None] = {}
        self._copies: dict[fx.Node, fx.Node] = {}

    def __contains__(self, node: fx.Node) -> bool:
        """Whether a node is a tensor that the sequence decides and no input does."""
        tensor = isinstance(node.meta.get("val"), torch.Tensor)
        return tensor and node in self._moving and node not in self.of_input

    def place(self, node: fx.Node) -> Place | None:
        """Where the sequence lies in such a value. Raises Mixed."""
        if node not in self._places:
            try:
                if self._pure(node) or self._begin(node) is not None:
                    place = found_in(self._shape(node), PRIMES["sequence"])
                else:
                    place = Carrier(
                        self.primes,
                        PRIMES["sequence"],
                        self.sequence,
                        lambda one: self.place(one) if one in self else None,
                    ).result(node)
            except Mixed as mixed:
                mixed.node = mixed.node or node
                raise
            self._places[node] = place
        return self._places[node]

    def table(self, node: fx.Node, batch_dim: int | None) -> PositionTable:
        """The table of such a value. batch_dim: which of its dims has the rows of the batch, all
        alike. Raises Mixed where fewer tokens have other rows."""
        place = self.place(node)
        if place is None:
            raise Mixed("depends on how many tokens there are")
        if place.inner != 1 or place.outer not in (1, PRIMES["batch"]):
            raise Mixed("has more entries than tokens in the dim of the tokens")
        if not self._pure(node):
            shape = list(shape_of(node, self._longest))
            if batch_dim is not None and shape[batch_dim] != 1:
                raise Mixed("depends on the row of the batch")
            own = self._own_rows(node, shape)
            if own is not None:
                return PositionTable(*own, shape, place.dim)
            made = self._flat(self._copy(node), node, shape, place.dim)
            return PositionTable(made, 0, shape, place.dim)
        value = self._proven(node, place)
        if batch_dim is not None and value.shape[batch_dim] != 1:
            first = value.narrow(batch_dim, 0, 1)
            if not torch.equal(first.expand_as(value), value):
                raise Mixed("depends on the row of the batch")
            value = first
        rows = value.movedim(place.dim, 0).reshape(self.length, -1)
        start = _counted(rows)
        held = None if start is not None else self._constants.node(rows)
        return PositionTable(held, start or 0, list(value.shape), place.dim)

    def _shape(self, node: Any) -> tuple[int, ...]:
        return shape_of(node, self.primes)

    def _value(self, node: fx.Node, length: int, batch: int = 1) -> Any:
        known = self._known.setdefault((length, batch), {})
        return computed(node, numbers_of(self.sizes, batch, length), known)

    def _pure(self, node: fx.Node) -> bool:
        """Whether sizes and constants decide a value."""
        return is_known(lambda: self._value(node, _TRIED[0]))

    def _proven(self, node: fx.Node, place: Place) -> torch.Tensor:
        """The value for as many tokens as the cache holds, of which shorter ones are the first
        rows, and all rows of a batch alike."""
        whole: torch.Tensor = self._value(node, self.length)
        if whole.shape[place.dim] < self.length:
            raise export_error(
                f"takes {whole.shape[place.dim]} rows of a table, and the cache holds "
                f"{self.length} tokens",
                node,
                f"Give max_length={whole.shape[place.dim]}.",
            )
        for length in (*_TRIED, self.length - 1):
            if 0 < length < self.length:
                part = self._value(node, length)
                if not _close(part, whole.narrow(place.dim, 0, length)):
                    raise Mixed("depends on how many tokens there are")
        two, one = self._value(node, _TRIED[0], 2), self._value(node, _TRIED[0])
        wide = [dim for dim in range(one.dim()) if two.shape[dim] != one.shape[dim]]
        for dim in wide:
            if any(not _close(part, one) for part in two.chunk(2, dim)):
                raise Mixed("depends on the row of the batch")
        return whole

    def _begin(self, node: fx.Node) -> int | None:
        """The first row, where a node is as many rows as there are tokens of a fixed tensor."""
        if node.target is not aten.slice.Tensor:
            return None
        given = arguments(node)
        x, dim, start, step = (given[name] for name in ("self", "dim", "start", "step"))
        if x in self or step != 1 or not isinstance(start or 0, int):
            return None
        whole = reads(node, self.sequence) and self._shape(node)[dim] == PRIMES["sequence"]
        return int(start or 0) if whole else None

    def _own_rows(self, node: fx.Node, shape: list[int]) -> tuple[fx.Node, int] | None:
        """(a fixed table in the graph, its first row), where a value is rows of one as they are."""
        x: Any = node.args[0]
        if x in self or x.meta["val"].dim() != 2 or shape[-1] != x.meta["val"].shape[1]:
            return None
        start = self._begin(node)
        if node.target is aten.embedding.default and self._pure(node.args[1]):  # type: ignore[arg-type]
            index = self._value(node.args[1], self.length)  # type: ignore[arg-type]
            start = _counted(index.reshape(-1, 1)) if index.numel() == self.length else None
            if start is not None:
                self._proven(node.args[1], self.place(node.args[1]))  # type: ignore[arg-type]
        if start is None:
            return None
        self._check_rows(node)
        return x, start

    def _copy(self, node: fx.Node) -> fx.Node:
        """A value that parameters decide, in the graph for as many tokens as the cache holds."""
        if node in self._copies:
            return self._copies[node]
        self._check_rows(node)

        def given(other: fx.Node) -> Any:
            if not isinstance(other.meta["val"], torch.Tensor):
                return size_of(other.meta["val"], self._longest)
            if other not in self:
                return other
            if not self._pure(other):
                return self._copy(other)
            place = self.place(other)
            if place is None:
                raise Mixed("depends on how many tokens there are")
            return self._constants.node(self._proven(other, place))

        with self.graph.inserting_before(node):
            args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), given)
            made = self._copies[node] = call_like(node, node.target, *args, **kwargs)
        return made

    def _check_rows(self, node: fx.Node) -> None:
        """A table of parameters must have a row for each token that the cache holds."""
        begin, needed, rows = self._begin(node), 0, 0
        if begin is not None:
            dim: Any = node.args[1]
            needed, rows = begin + self.length, self._shape(node.args[0])[dim]
        elif node.target is aten.embedding.default:
            index: Any = node.args[1]
            if index in self and self._pure(index):
                needed = int(self._value(index, self.length).max()) + 1
                rows = self._shape(node.args[0])[0]
        if needed > rows:
            longest = self.length - (needed - rows)
            raise export_error(
                f"the cache holds {self.length} tokens, which need {needed} rows of a table of "
                f"{rows}",
                node,
                f"Give max_length={longest}.",
            )

    def _flat(self, made: fx.Node, node: fx.Node, shape: list[int], dim: int) -> fx.Node:
        """[length, others] of a copy."""
        order = [dim, *(d for d in range(len(shape)) if d != dim)]
        with self.graph.inserting_before(node):
            if dim != 0:
                made = self.graph.call_function(aten.permute.default, (made, order))
            if len(shape) != 2 or dim != 0:
                made = self.graph.call_function(aten.reshape.default, (made, [self.length, -1]))
        made.meta = {k: v for k, v in node.meta.items() if k != "val"}
        return made


def _counted(rows: torch.Tensor) -> int | None:
    """The number in the first row, where each row is one more than the one before."""
    if rows.dtype != torch.int64 or rows.shape[1] != 1:
        return None
    start = int(rows[0, 0])
    expected = torch.arange(start, start + len(rows)).unsqueeze(1)
    return start if torch.equal(rows, expected) else None


def _close(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.shape != right.shape:
        return False
    if not left.is_floating_point():
        return torch.equal(left, right)
    return torch.allclose(left.float(), right.float(), rtol=1e-3, atol=1e-3)
