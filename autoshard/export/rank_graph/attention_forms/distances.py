"""A bias that depends on how far a key lies before its query, as a table of distances.

    before                                          after, the same in the graph
    %0: i64[s,s] = ... arange, sub, log, where ...  %0: i64[1,64] = constant, of distances 0, 1, ...
    %1: f32[s,s,8] = embedding(%w, %0)              %1: f32[1,64,8] = embedding(%w, %0)
    %2: f32[8,s,s] = permute(%1, [2, 0, 1])         %2: f32[8,1,64] = permute(%1, [2, 0, 1])
                                                    %3: f32[64,8] = permute(reshape(%2, [8, 64]))

So T5 has it, of rows that it learns. A bias that sizes alone decide (alibi written for each pair)
is such a table by its values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autoshard.export.rank_graph.evaluation import Unknown, computed

aten = torch.ops.aten

_PASSED = (
    *(aten.permute.default, aten.transpose.int, aten.unsqueeze.default, aten.select.int),
    *(aten._to_copy.default, aten.mul.Tensor, aten.neg.default),
)
"""What may be done to looked-up rows: nothing that knows how many pairs there are."""

_TRIED = 7


@dataclass(frozen=True, eq=False)
class LearnedBias:
    """A bias of rows that a parameter has. steps: from the lookup to the bias, each reading the one
    before. index: the row for each distance.
    """

    steps: Sequence[fx.Node]
    index: torch.Tensor

    @property
    def term(self) -> fx.Node:
        """The bias."""
        return self.steps[-1]

    def write(self, graph: fx.Graph, index: fx.Node) -> fx.Node:
        """[distances, heads], computed in the graph from `index`, a placeholder of `self.index`."""
        lookup, *others = self.steps
        table: Any = lookup.args[0]
        made = graph.call_function(aten.embedding.default, (table, index))
        for step in others:
            made = graph.call_function(
                step.target,  # type: ignore[arg-type]
                (made, *step.args[1:]),
                dict(step.kwargs),
            )
        heads = self.term.meta["val"].shape[-3]
        made = graph.call_function(aten.reshape.default, (made, [heads, -1]))
        return graph.call_function(aten.permute.default, (made, [1, 0]))


def learned_bias(
    term: fx.Node, constants: Mapping[str, torch.Tensor], sizes: Mapping[str, str], length: int
) -> LearnedBias | None:
    """A bias [1, heads, s, s] as one of distances, for `length` tokens; None where it is no such.

    sizes: the name of each symbol. All keys at one distance before their queries must have one row.
    """
    steps = [term]
    while steps[0].target is not aten.embedding.default:
        node = steps[0]
        source: Any = node.args[0] if node.args else None
        if node.target not in _PASSED or not isinstance(source, fx.Node):
            return None
        if any(isinstance(arg, fx.Node) for arg in node.args[1:]):
            return None
        steps.insert(0, source)
    table, where = steps[0].args[:2]
    if not isinstance(table, fx.Node) or table.op != "placeholder":
        return None
    shape = term.meta["val"].shape
    if len(shape) not in (3, 4) or (len(shape) == 4 and shape[0] != 1):
        return None

    def index(tokens: int) -> torch.Tensor:
        numbers = {symbol: {"batch": 1, "sequence": tokens}[name] for symbol, name in sizes.items()}
        found: torch.Tensor = computed(where, constants, numbers, {})  # type: ignore[arg-type]
        return found

    try:
        whole, small = index(length), index(_TRIED)
    except Unknown:
        return None
    if whole.shape != (length, length):
        return None
    by_distance = whole[-1].flip(0)
    rows, heads = table.meta["val"].shape
    numbers = torch.arange(rows * heads, dtype=torch.float64).view(rows, heads)
    bias = _run(steps, numbers, small)
    table_of = _run(steps, numbers, by_distance.unsqueeze(0))
    shapes = (shape[-3], _TRIED, _TRIED), (shape[-3], 1, length)
    if (bias.shape[-3:], table_of.shape[-3:]) != shapes:
        return None
    alike = alike_at_distance(bias.reshape(-1, _TRIED, _TRIED), table_of.reshape(-1, length))
    if not alike or not alike_at_distance(whole.unsqueeze(0), by_distance.unsqueeze(0)):
        return None
    return LearnedBias(steps, by_distance.unsqueeze(0))


def _run(steps: Sequence[fx.Node], table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    found = table[index]
    for step in steps[1:]:
        kwargs = {name: value for name, value in step.kwargs.items() if name != "dtype"}
        if step.target is not aten._to_copy.default:
            found = step.target(found, *step.args[1:], **kwargs)  # type: ignore[operator]
    return found


def alike_at_distance(
    values: torch.Tensor, table: torch.Tensor, seen: torch.Tensor | None = None
) -> bool:
    """Whether [heads, queries, keys] are those of `table`, [heads, distances], wherever a key is
    not after its query. seen: [queries, keys], the pairs that count; None for all."""
    size = values.shape[-1]
    steps = torch.arange(size)
    distance = steps.unsqueeze(1) - steps
    counted = distance >= 0 if seen is None else seen
    wanted = table[:, distance.clamp_min(0)]
    return bool(((values == wanted) | ~counted).all())
