"""What the queries of an attention see, read from its mask, and written again as few operators.

A mask that sizes and constants decide is computed, at a small size and at the largest the caller
will use: whether it is the causal one, that of a window of the last tokens, or none, is seen from
its values. Beside it there may be a bias of each key (alibi: a slope times the key's position).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autoshard.export.errors import export_error
from autoshard.export.rank_graph.evaluation import Unknown, computed

aten = torch.ops.aten

PROVEN = 8192
"""Masks are computed whole up to this many tokens; s * s entries take memory."""


@dataclass(frozen=True, eq=False)
class Sight:
    """What a query at a position sees. causal: no key behind it, else all. window: of these the
    last so many, None for all. bias: [heads or 1, keys], added to the scores; None for none.
    """

    causal: bool
    window: int | None = None
    bias: torch.Tensor | None = None

    @property
    def plain(self) -> bool:
        """Whether a flag says it all."""
        return self.window is None and self.bias is None


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
    try:
        for numbers in tried:
            known: dict[fx.Node, Any] = {}
            by_symbol = {symbol: numbers[name] for symbol, name in sizes.items()}
            terms = [computed(term, constants, by_symbol, known) for term in _terms(mask)]
            sight = _sight(terms)
            if sight is None:
                return None
            if found is not None and not _continues(found, sight, tried[0]["sequence"]):
                return None
            found = sight
    except Unknown:
        return None
    if longest > PROVEN and found is not None and found.causal:
        if found.bias is not None:
            return None
        if found.window is None and _limits(mask):
            raise export_error(
                f"its mask has a limit between {PROVEN} and {longest} tokens, which no causal "
                "flag says",
                mask,
                f"Give a maximum sequence of at most {PROVEN}.",
            )
    return found


def _terms(mask: fx.Node) -> list[fx.Node]:
    """The parts of a mask that is a sum."""
    if mask.target is not aten.add.Tensor or mask.kwargs.get("alpha", 1) != 1:
        return [mask]
    parts: Any = mask.args
    if not all(isinstance(part, fx.Node) for part in parts):
        return [mask]
    return [term for part in parts for term in _terms(part)]


def _sight(terms: list[torch.Tensor]) -> Sight | None:
    """One part says which keys are seen, the others are a bias of each key."""
    seen: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    for value in terms:
        if value.dim() >= 2 and value.shape[-2] == 1 and value.shape[-1] > 1:
            alike = _heads(value.squeeze(-2)) if value.dtype.is_floating_point else None
            if alike is None:
                return None
            bias = alike.float() if bias is None else bias + alike
            continue
        square = _square(value)
        if square is None or seen is not None:
            return None
        seen = square
    if seen is None:
        return None
    if bool(seen.all()):
        return None if bias is not None else Sight(causal=False)
    n = seen.shape[-1]
    if seen.shape[-2] != n:
        return None
    window = int(seen[-1].sum())
    if not torch.equal(seen, _visible(n, window)):
        return None
    return Sight(causal=True, window=window if window < n else None, bias=bias)


def _visible(n: int, window: int) -> torch.Tensor:
    """[n, n]: each query sees the last `window` keys up to its own."""
    seen = torch.ones(n, n, dtype=torch.bool)
    return seen.tril() & seen.triu(1 - window)


def _square(value: torch.Tensor) -> torch.Tensor | None:
    """[queries, keys] of a mask whose rows and heads are all alike: which are seen."""
    if value.dim() < 2:
        return None
    if value.dtype != torch.bool:
        if not value.dtype.is_floating_point:
            return None
        hidden = value <= torch.finfo(value.dtype).min / 2
        if not bool((hidden | (value == 0)).all()):
            return None
        value = ~hidden
    value = value.reshape(-1, *value.shape[-2:])
    return value[0] if bool((value == value[:1]).all()) else None


def _heads(value: torch.Tensor) -> torch.Tensor | None:
    """[heads or 1, keys] of [batch, heads, keys], the rows of the batch alike."""
    if value.dim() != 3:
        return None
    return value[0] if bool((value == value[:1]).all()) else None


def _continues(short: Sight, long: Sight, length: int) -> bool:
    """Whether a mask of more tokens says the same of the first `length`."""
    if short.causal != long.causal or (short.bias is None) != (long.bias is None):
        return False
    if (short.window or length) != min(long.window or length, length):
        return False
    return short.bias is None or long.bias is None or torch.equal(short.bias, long.bias[:, :length])


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
