"""Functions of a tensor's indices: `Affine`, an integer that grows by a fixed step along each dim
(positions; one number), and `Piecewise`, two numbers by comparisons of such (a mask)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from autoshard.planning import Size

Number = int | float | bool


@dataclass(frozen=True)
class Affine:
    """offset + sum of slopes[d] * index[d]; a dim of size 1 has no slope. With slopes, integers."""

    offset: Number
    slopes: tuple[int, ...]

    @property
    def constant(self) -> bool:
        """Whether every element is `offset`."""
        return not any(self.slopes)


@dataclass(frozen=True)
class Condition:
    """`left` at an index is at least 0, or is 0 where `equal`."""

    left: Affine
    equal: bool = False


@dataclass(frozen=True)
class Piecewise:
    """`yes` where all conditions hold, which are over the dims of the tensor, `no` elsewhere."""

    conditions: tuple[Condition, ...]
    yes: Number
    no: Number


Value = Affine | Piecewise


@dataclass(frozen=True)
class Indexed:
    """A tensor operand: its index function, and the fake that has its shape and dtype."""

    value: Value
    fake: torch.Tensor


def affine(offset: Number, slopes: Iterable[int], shape: Iterable[Size]) -> Affine:
    """An Affine of a tensor of `shape`; along dims of size 1 nothing changes."""
    kept = (
        0 if isinstance(size, int) and size == 1 else slope for slope, size in zip(slopes, shape)
    )
    return Affine(offset, tuple(kept))


def constant(number: Number, val: torch.Tensor) -> Affine:
    return Affine(torch.tensor(number, dtype=val.dtype).item(), (0,) * val.dim())


def moved(value: Value, source: torch.Tensor, dims: list[int | None], val: torch.Tensor) -> Value:
    """`value` where dim i of the result `val` is dim dims[i] of the source, or a new one."""

    def move(one: Affine) -> Affine:
        lost = [one.slopes[d] for d in range(source.dim()) if d not in dims]
        assert not any(lost)
        slopes = [0 if d is None else one.slopes[d] for d in dims]
        return affine(one.offset, slopes, val.shape)

    return mapped(value, move)


def mapped(value: Value, change: Callable[[Affine], Affine]) -> Value:
    if isinstance(value, Affine):
        return change(value)
    conditions = tuple(Condition(change(c.left), c.equal) for c in value.conditions)
    return Piecewise(conditions, value.yes, value.no)


def broadcast(operand: Indexed, val: torch.Tensor) -> Value:
    new = val.dim() - operand.fake.dim()
    return moved(operand.value, operand.fake, [None] * new + list(range(operand.fake.dim())), val)


def flipped(value: Piecewise) -> Piecewise:
    """The same tensor by the opposite condition, where there is one that is so written."""
    if len(value.conditions) != 1 or value.conditions[0].equal:
        return value
    left = value.conditions[0].left
    opposite = Affine(-left.offset - 1, tuple(-slope for slope in left.slopes))
    return Piecewise((Condition(opposite),), value.no, value.yes)
