"""What sizes and constants decide in a rank graph: values, computed without its weights, and where
an axis of the inputs, the sequence or the batch, lies in a value.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autoshard.runtime import compat
from autoshard.runtime.graph_meta import HELD

aten = torch.ops.aten


class Unknown(Exception):
    """A value depends on what only the caller knows."""


def computed(node: fx.Node, sizes: Mapping[str, int], known: dict[fx.Node, Any]) -> Any:
    """The value of a node that constants and `sizes`, by symbol, decide; Unknown otherwise.

    known: values that are known already, by node; what is computed is added.
    """
    if node in known:
        return known[node]
    if node.op == "placeholder":
        if HELD not in node.meta:
            raise Unknown
        known[node] = node.meta[HELD]
    elif node.target is aten.sym_size.int:
        known[node] = size_of(node.meta["val"], sizes)
    elif getattr(node.target, "namespace", "aten") != "aten":
        raise Unknown
    else:
        args, kwargs = fx.node.map_arg(
            (node.args, dict(node.kwargs)), lambda n: computed(n, sizes, known)
        )
        known[node] = node.target(*args, **kwargs)  # type: ignore[operator]
    return known[node]


def is_known(value: Callable[[], Any]) -> bool:
    """Whether sizes and constants decide what is asked for."""
    try:
        value()
    except Unknown:
        return False
    return True


def size_of(extent: Any, sizes: Mapping[str, int]) -> int:
    """The number that a size, an expression of the symbols of `sizes`, becomes."""
    if isinstance(extent, int):
        return extent
    known = {symbol: sizes.get(str(symbol)) for symbol in compat.size_symbols(extent)}
    if None in known.values():
        raise Unknown
    return int(compat.size_expression(extent).subs(known))


PRIMES = {"batch": 10007, "sequence": 1000003}
"""The size a dynamic dim is given in proofs: larger primes than any fixed size has as a factor."""


class Mixed(Exception):
    """A value at one place of an axis depends on other places, or on the size of the axis.

    node: where, which the first to catch it sets.
    """

    node: fx.Node | None = None


@dataclass(frozen=True)
class Place:
    """An axis in a value: dim `dim` has outer * axis * inner entries, in this order."""

    dim: int
    outer: int = 1
    inner: int = 1

    @property
    def alone(self) -> bool:
        """Whether the dim is the axis and nothing else."""
        return self.outer == self.inner == 1


Places = dict[fx.Node, Place | None]
"""Of each node; None where its value has nothing of the axis."""


def numbers_of(sizes: Mapping[str, str], batch: int, sequence: int) -> dict[str, int]:
    """Of each symbol, by whose name it is, a number. sizes: the name of each symbol."""
    return {symbol: {"batch": batch, "sequence": sequence}[name] for symbol, name in sizes.items()}


def shape_of(node: fx.Node, numbers: Mapping[str, int]) -> tuple[int, ...]:
    """The shape of a node's tensor, with numbers in the place of symbols."""
    return tuple(size_of(extent, numbers) for extent in node.meta["val"].shape)


def symbol_of(sizes: Mapping[str, str], name: str) -> str | None:
    """The symbol of a dynamic dim, of the name of each symbol; None where it has one size."""
    return next((symbol for symbol, one in sizes.items() if one == name), None)


def depends(extent: Any, symbol: str) -> bool:
    """Whether a size is computed from a symbol."""
    if isinstance(extent, int):
        return False
    return any(str(free) == symbol for free in compat.size_symbols(extent))


def reads(node: fx.Node, symbol: str) -> bool:
    """Whether a node is a number computed from a symbol, or a tensor of such a shape."""
    val = node.meta.get("val")
    if isinstance(val, torch.Tensor):
        return any(depends(extent, symbol) for extent in val.shape)
    numbers = (torch.SymInt, torch.SymFloat, torch.SymBool)
    return isinstance(val, numbers) and depends(val, symbol)


def found_in(shape: Sequence[int], axis: int) -> Place | None:
    """The place of an axis, a prime of PRIMES, in a shape. Raises Mixed where it is there twice."""
    dims = [dim for dim, size in enumerate(shape) if size and size % axis == 0]
    if not dims:
        return None
    (dim, *more) = dims
    if more or shape[dim] % axis**2 == 0:
        raise Mixed("pairs tokens with tokens")
    return Place(dim, shape[dim] // axis)


def reshaped(place: Place, axis: int, before: Sequence[int], after: Sequence[int]) -> Place:
    """The place after a reshape. Raises Mixed where no dim has the whole axis any more."""
    low = place.inner  # entries between two consecutive places of the axis
    for size in before[place.dim + 1 :]:
        low *= size
    inside = 1
    for dim in reversed(range(len(after))):
        size = after[dim]
        if low % inside == 0 and (inside * size) % (low * axis) == 0:
            return Place(dim, inside * size // (low * axis), low // inside)
        inside *= size
    raise Mixed("takes the sequence apart")


def cut(place: Place, axis: int, size: int, start: int, end: int) -> Place:
    """The place in a slice of its own dim. Raises Mixed where that takes a part of the axis."""
    start = min(start + size if start < 0 else start, size)
    end = min(end + size if end < 0 else end, size)
    unit = axis * place.inner
    if start % unit or end % unit or end <= start:
        raise Mixed("takes a part of the sequence")
    return Place(place.dim, (end - start) // unit, place.inner)
