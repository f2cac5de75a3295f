"""What the queries of an attention see, read from its mask, and written again as few operators.

A mask that sizes and constants decide is computed, at a small size and at the largest the caller
will use: whether it is the causal one, that of a window of the last tokens, or none, is seen from
its values. Beside it there may be a bias of each key (alibi: a slope times the key's position), or
one of each distance between key and query.

A bias that depends on how far a key lies before its query is a table of distances:

    before                                          after, the same in the graph
    %0: i64[s,s] = ... arange, sub, log, where ...  %0: i64[1,64] = constant, of distances 0, 1, ...
    %1: f32[s,s,8] = embedding(%w, %0)              %1: f32[1,64,8] = embedding(%w, %0)
    %2: f32[8,s,s] = permute(%1, [2, 0, 1])         %2: f32[8,1,64] = permute(%1, [2, 0, 1])
                                                    %3: f32[64,8] = permute(reshape(%2, [8, 64]))

So T5 has it, of rows that it learns. A bias that sizes alone decide (alibi written for each pair)
is such a table by its values.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from autoshard.export.errors import export_error
from autoshard.export.rank_graph.attention_forms.written import hides
from autoshard.export.rank_graph.evaluation import Unknown, computed, is_known, numbers_of
from autoshard.planning import reached

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


def learned_bias(term: fx.Node, sizes: Mapping[str, str], length: int) -> LearnedBias | None:
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

    index: Any = where
    try:
        whole, small = (computed(index, numbers_of(sizes, 1, n), {}) for n in (length, _TRIED))
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


PROVEN = 8192
"""Masks are computed whole up to this many tokens; s * s entries take memory."""


@dataclass(frozen=True, eq=False)
class Sight:
    """What a query at a position sees. causal: no key behind it, else all. window: of these the
    last so many, None for all. bias: [heads or 1, keys], added to the scores; None for none.
    distances: [heads or 1, distances from the query back to the key], or what computes it, as well.
    """

    causal: bool
    window: int | None = None
    bias: torch.Tensor | None = None
    distances: torch.Tensor | LearnedBias | None = None

    @property
    def biased(self) -> bool:
        """Whether something is added to the scores of what is seen."""
        return self.bias is not None or self.distances is not None

    @property
    def plain(self) -> bool:
        """Whether a flag says it all."""
        return self.window is None and not self.biased


def read_mask(mask: fx.Node, sizes: Mapping[str, str], largest: Mapping[str, int]) -> Sight | None:
    """What a mask lets through; None where it depends on an input, or has another form.

    sizes: the name of each symbol; largest: the largest value of each name.
    """
    longest = largest.get("sequence", 1)
    tried = [(2, _TRIED), (1, min(longest, PROVEN))]  # batch, sequence
    found: Sight | None = None
    learned: LearnedBias | None = None
    try:
        small = numbers_of(sizes, *tried[0])
        terms, others = _terms(mask, lambda node: is_known(lambda: computed(node, small, {})))
        if not terms:
            return None
        if others:
            (other, *more) = others
            learned = learned_bias(other, sizes, tried[1][1])
            if more or learned is None or longest > PROVEN:
                return None
        for numbers in tried:
            known: dict[fx.Node, Any] = {}
            values = [computed(term, numbers_of(sizes, *numbers), known) for term in terms]
            sight = _sight(values, numbers[1])
            if sight is None or (found is not None and not _continues(found, sight, _TRIED)):
                return None
            found = sight
    except Unknown:
        return None
    if found is not None and learned is not None:
        if not found.causal or found.distances is not None:
            return None
        found = replace(found, distances=learned)
    if longest > PROVEN and found is not None and found.causal:
        if found.biased:
            return None
        if found.window is None and _limits(mask):
            raise export_error(
                f"its mask has a limit between {PROVEN} and {longest} tokens, which no causal "
                "flag says",
                mask,
                f"Give a maximum sequence of at most {PROVEN}.",
            )
    return found


def _terms(mask: fx.Node, pure: Callable[[fx.Node], bool]) -> tuple[list[fx.Node], list[fx.Node]]:
    """The parts of a mask that is a sum, or a choice between a bias and what hides: those that
    sizes and constants decide, and the others."""
    parts: Any = mask.args
    if mask.target is aten.add.Tensor and mask.kwargs.get("alpha", 1) == 1:
        if not all(isinstance(part, fx.Node) for part in parts):
            return [mask], []
    elif mask.target is aten.where.self and not pure(mask) and hides(parts[2]):
        parts = parts[:2]
    else:
        return ([mask], []) if pure(mask) else ([], [mask])
    found = [_terms(part, pure) for part in parts]
    return [one for terms, _ in found for one in terms], [one for _, more in found for one in more]


def _sight(terms: list[torch.Tensor], length: int) -> Sight | None:
    """One part says which keys are seen, the others are a bias of each key or of each distance."""
    seen: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    pairs: torch.Tensor | None = None
    for value in terms:
        if value.dim() >= 2 and value.shape[-2] == 1 and value.shape[-1] > 1:
            alike = _heads(value) if value.dtype.is_floating_point else None
            if alike is None:
                return None
            alike = alike.float() - alike[:, :1].float()  # of a whole row, softmax takes no notice
            bias = alike if bias is None else bias + alike
            continue
        square = _square(value)
        if square is None:
            return None
        if value.dtype != torch.bool and bool((rest := value.masked_fill(~square, 0)).any()):
            alike = _heads(rest)
            if alike is None or pairs is not None:
                return None
            pairs = alike.float().unflatten(-1, square.shape)
            if bool(square.all()):
                continue
        if seen is not None:
            return None
        seen = square
    if seen is None:
        return None
    if bool(seen.all()):
        return None if bias is not None or pairs is not None else Sight(causal=False)
    n = seen.shape[-1]
    if seen.shape[-2] != n:
        return None
    window = int(seen[-1].sum())
    if not torch.equal(seen, torch.ones_like(seen).tril().triu(1 - window)):
        return None
    table = None
    if pairs is not None:
        table = pairs[:, -1].flip(-1)
        if n != length or not alike_at_distance(pairs, table, seen):
            return None
    return Sight(True, window if window < n else None, bias, table)


def _square(value: torch.Tensor) -> torch.Tensor | None:
    """[queries, keys] of a mask whose rows and heads hide alike: which are seen."""
    if value.dim() < 2:
        return None
    if value.dtype != torch.bool:
        if not value.dtype.is_floating_point:
            return None
        value = value > torch.finfo(value.dtype).min / 2
    return _first(value.reshape(-1, *value.shape[-2:]))


def _heads(value: torch.Tensor) -> torch.Tensor | None:
    """[heads or 1, queries * keys] of a mask of up to 4 dims, the rows of the batch alike."""
    if value.dim() > 4:
        return None
    return _first(value.reshape(*(1,) * (4 - value.dim()), *value.shape).flatten(-2))


def _first(value: torch.Tensor) -> torch.Tensor | None:
    """What all entries of the first dim are, where they are alike."""
    return value[0] if bool((value == value[:1]).all()) else None


def _continues(short: Sight, long: Sight, length: int) -> bool:
    """Whether a mask of more tokens says the same of the first `length`."""
    if short.causal != long.causal:
        return False
    if (short.window or length) != min(long.window or length, length):
        return False
    pairs: Any = [(short.bias, long.bias), (short.distances, long.distances)]
    return all(
        one is other
        if one is None or other is None
        else torch.allclose(one, other[:, :length], rtol=1e-5, atol=1e-5)
        for one, other in pairs
    )


def _limits(mask: fx.Node) -> bool:
    """Whether a number larger than PROVEN takes part in a mask."""
    return any(
        isinstance(arg, int) and abs(arg) > PROVEN
        for node in reached([mask], lambda node: node.all_input_nodes)
        if node.target is not aten.slice.Tensor
        for arg in node.args
    )
