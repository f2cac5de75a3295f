"""What the queries of an attention see, read from its mask, and written again as few operators.

A mask that sizes and constants decide is computed, at a small size and at the largest the caller
will use: whether it is the causal one, that of a window of the last tokens, or none, is seen from
its values. Beside it there may be a bias of each key (alibi: a slope times the key's position), or
one of each distance between key and query (distances.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from autoshard.export.errors import export_error
from autoshard.export.rank_graph.attention_forms.distances import (
    LearnedBias,
    alike_at_distance,
    learned_bias,
)
from autoshard.export.rank_graph.attention_forms.written import hides
from autoshard.export.rank_graph.evaluation import Unknown, computed

aten = torch.ops.aten

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


def read_mask(
    mask: fx.Node,
    constants: Mapping[str, torch.Tensor],
    sizes: Mapping[str, str],
    largest: Mapping[str, int],
) -> Sight | None:
    """What a mask lets through; None where it depends on an input, or has another form.

    sizes: the name of each symbol; largest: the largest value of each name.
    """
    longest = largest.get("sequence", 1)
    tried = [{"batch": 2, "sequence": 7}, {"batch": 1, "sequence": min(longest, PROVEN)}]
    found: Sight | None = None
    learned: LearnedBias | None = None
    try:
        terms, others = _terms(mask, lambda node: _pure(node, constants, sizes, tried[0]))
        if not terms:
            return None
        if others:
            (other, *more) = others
            learned = learned_bias(other, constants, sizes, tried[1]["sequence"])
            if more or learned is None or longest > PROVEN:
                return None
        for numbers in tried:
            known: dict[fx.Node, Any] = {}
            by_symbol = {symbol: numbers[name] for symbol, name in sizes.items()}
            values = [computed(term, constants, by_symbol, known) for term in terms]
            sight = _sight(values, numbers["sequence"])
            if sight is None:
                return None
            if found is not None and not _continues(found, sight, tried[0]["sequence"]):
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


def _pure(
    node: fx.Node,
    constants: Mapping[str, torch.Tensor],
    sizes: Mapping[str, str],
    numbers: Mapping[str, int],
) -> bool:
    """Whether sizes and constants decide a value."""
    try:
        computed(node, constants, {symbol: numbers[name] for symbol, name in sizes.items()}, {})
    except Unknown:
        return False
    return True


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
            rows = value.reshape(*(1,) * (4 - value.dim()), *value.shape).squeeze(-2)
            alike = _heads(rows) if value.dtype.is_floating_point else None
            if alike is None:
                return None
            alike = alike.float() - alike[:, :1].float()  # of a whole row, softmax takes no notice
            bias = alike if bias is None else bias + alike
            continue
        square = _square(value)
        if square is None:
            return None
        if value.dtype != torch.bool and bool((rest := value.masked_fill(~square, 0)).any()):
            alike = _heads(rest.reshape(*(1,) * (4 - rest.dim()), *rest.shape).flatten(-2))
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
    if not torch.equal(seen, _visible(n, window)):
        return None
    table = None
    if pairs is not None:
        table = pairs[:, -1].flip(-1)
        if n != length or not alike_at_distance(pairs, table, seen):
            return None
    return Sight(True, window if window < n else None, bias, table)


def _visible(n: int, window: int) -> torch.Tensor:
    """[n, n]: each query sees the last `window` keys up to its own."""
    seen = torch.ones(n, n, dtype=torch.bool)
    return seen.tril() & seen.triu(1 - window)


def _square(value: torch.Tensor) -> torch.Tensor | None:
    """[queries, keys] of a mask whose rows and heads hide alike: which are seen."""
    if value.dim() < 2:
        return None
    if value.dtype != torch.bool:
        if not value.dtype.is_floating_point:
            return None
        value = value > torch.finfo(value.dtype).min / 2
    value = value.reshape(-1, *value.shape[-2:])
    return value[0] if bool((value == value[:1]).all()) else None


def _heads(value: torch.Tensor) -> torch.Tensor | None:
    """[heads or 1, keys] of [batch, heads, keys], the rows of the batch alike."""
    if value.dim() != 3:
        return None
    return value[0] if bool((value == value[:1]).all()) else None


def _continues(short: Sight, long: Sight, length: int) -> bool:
    """Whether a mask of more tokens says the same of the first `length`."""
    if short.causal != long.causal:
        return False
    if (short.window or length) != min(long.window or length, length):
        return False
    pairs = [(short.bias, long.bias), (short.distances, long.distances)]
    return all(_begins(one, other, length) for one, other in pairs)


def _begins(short: Any, long: Any, length: int) -> bool:
    if short is None or long is None:
        return short is long
    return torch.allclose(short, long[:, :length], rtol=1e-5, atol=1e-5)


def _limits(mask: fx.Node) -> bool:
    """Whether a number larger than PROVEN takes part in a mask."""
    seen, todo = {mask}, [mask]
    while todo:
        node = todo.pop()
        if node.target is not aten.slice.Tensor:
            for arg in node.args:
                if isinstance(arg, int) and abs(arg) > PROVEN:
                    return True
        todo += [n for n in node.all_input_nodes if n not in seen]
        seen.update(node.all_input_nodes)
    return False
