"""A library for passes over graphs after autograd: what became of a value's dims in its views.

The dims of one value are numbered; each is an atom, and a layout says of another value which atoms
each of its dims is made of, the slowest first. Views and permutations rearrange atoms: what they do
to a value of many rows is so known without a rule for each spelling of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import fx

from autoshard.passes.bucketing import aten


class Atom(NamedTuple):
    """A dim of the value that is followed, or (-1) the ranks of its axis."""

    number: int
    size: int


Arrangement = tuple[tuple[Atom, ...], ...]
"""Of each dim its atoms; those of size 1 are left out."""

RANKS = -1

_REGROUPS = frozenset(
    getattr(aten, name)
    for name in ("view", "reshape", "_unsafe_view", "unsqueeze", "squeeze", "flatten", "unflatten")
)
_PERMUTES = frozenset({aten.permute, aten.transpose, aten.t})
_SAME = frozenset({aten.clone, aten.alias, aten.detach, aten.contiguous})


def gathered_layout(shard: Sequence[int], n: int) -> Arrangement:
    """Of what `n` ranks' shards are gathered to by an all-gather, or of what is reduce-scattered to
    them: blocks of whole shards along the first dim."""
    atoms = [Atom(i, size) for i, size in enumerate(shard)]
    return _without_ones(((Atom(RANKS, n), atoms[0]), *((atom,) for atom in atoms[1:])))


def below(node: fx.Node, layout: Arrangement) -> Arrangement | None:
    """The layout of a view of a value; None: it is none, or cuts an atom."""
    kind = getattr(node.target, "overloadpacket", None)
    if kind in _SAME:
        return layout
    if kind in _REGROUPS:
        return _regrouped(layout, node.meta["val"].shape)
    order = _order(node, len(layout))
    return None if order is None else tuple(layout[dim] for dim in order)


def above(node: fx.Node, layout: Arrangement) -> Arrangement | None:
    """The layout of what `node` is a view of, from its own."""
    kind = getattr(node.target, "overloadpacket", None)
    if kind in _SAME:
        return layout
    if kind in _REGROUPS:
        return _regrouped(layout, node.args[0].meta["val"].shape)  # type: ignore[union-attr]
    order = _order(node, len(layout))
    return None if order is None else tuple(layout[order.index(dim)] for dim in range(len(order)))


def split_dim(layout: Arrangement, shard: Sequence[int]) -> int | None:
    """The dim along which shards are laid side by side in a matrix of all rows; None: it is none.

    A matrix of rows has the last dim of the value as its columns, and every other, in order, as its
    rows.
    """
    last = len(shard) - 1
    if len(layout) != 2 or [atom.number for atom in layout[1]] not in ([last], []):
        return None
    if not layout[1] and shard[last] != 1:
        return None
    numbers = [atom.number for atom in layout[0]]
    ranks = numbers.index(RANKS) if RANKS in numbers else None
    others = [i for i in range(last) if shard[i] != 1]
    if ranks is None or [number for number in numbers if number != RANKS] != others:
        return None
    if ranks + 1 < len(numbers):
        return numbers[ranks + 1]
    return last - 1 if last and shard[last - 1] == 1 else None


def in_order(layout: Arrangement, shard: Sequence[int], dim: int) -> bool:
    """Whether a value has its elements in the order of the one gathered along `dim`."""
    wanted = [i for i in range(len(shard)) if shard[i] != 1 or i == dim]
    place = wanted.index(dim)
    numbers = [i for i in [*wanted[:place], RANKS, *wanted[place:]] if i < 0 or shard[i] != 1]
    return [atom.number for dims in layout for atom in dims] == numbers


def is_rearranged(node: fx.Node) -> bool:
    """Whether a node is a view, a permutation or a copy of its operand."""
    kind = getattr(node.target, "overloadpacket", None)
    return kind in _SAME | _REGROUPS | _PERMUTES


def _regrouped(layout: Arrangement, shape: Sequence[int]) -> Arrangement | None:
    if not all(isinstance(size, int) for size in shape):
        return None
    atoms = [atom for dims in layout for atom in dims]
    found: list[tuple[Atom, ...]] = []
    for size in shape:
        group: list[Atom] = []
        held = 1
        while held < size and atoms:
            group.append(atoms.pop(0))
            held *= group[-1].size
        if held != size:
            return None
        found.append(tuple(group))
    return tuple(found) if not atoms else None


def _order(node: fx.Node, dims: int) -> list[int] | None:
    """The dims of its operand, as a permutation has them; None: it is none."""
    kind, args = getattr(node.target, "overloadpacket", None), node.args[1:]
    order = list(range(dims))
    if kind is aten.permute:
        given: Any = args[0]
        return [dim % dims for dim in given]
    if kind is aten.transpose or (kind is aten.t and dims == 2):
        a, b = args if args else (0, 1)
        order[a], order[b] = order[b], order[a]  # type: ignore[index]
        return order
    return None


def _without_ones(layout: Arrangement) -> Arrangement:
    return tuple(tuple(atom for atom in dims if atom.size != 1) for dims in layout)
