"""Functions of a tensor's indices: `Affine`, an integer that grows by a fixed step along each dim
(positions; one number), `Elements` of a tensor that only a call knows, and `Piecewise`, two numbers
by comparisons of such (a mask)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import fx

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
class Elements:
    """source[index] + offset, where `index` has an Affine for each dim of the source: its elements
    are integers or booleans, and not known."""

    source: fx.Node
    index: tuple[Affine, ...]
    offset: int = 0


@dataclass(frozen=True)
class Condition:
    """`left` at an index is at least 0, or is 0 where `equal`."""

    left: Affine
    equal: bool = False


@dataclass(frozen=True)
class Difference:
    """`more` less `less`, of one source, is at least 0, or is 0 where `equal`."""

    more: Elements
    less: Elements
    equal: bool = False


@dataclass(frozen=True)
class Holds:
    """The elements, of booleans, are True."""

    elements: Elements


Test = Condition | Difference | Holds


@dataclass(frozen=True)
class Piecewise:
    """`yes` where all conditions hold, which are over the dims of the tensor, `no` elsewhere."""

    conditions: tuple[Test, ...]
    yes: Number
    no: Number


Value = Affine | Elements | Piecewise


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


def elements_of(node: fx.Node) -> Elements:
    """A node's tensor as elements of itself."""
    shape = node.meta["val"].shape
    own = (affine(0, [int(i == d) for i in range(len(shape))], shape) for d in range(len(shape)))
    return Elements(node, tuple(own))


def moved(value: Value, source: torch.Tensor, dims: list[int | None], val: torch.Tensor) -> Value:
    """`value` where dim i of the result `val` is dim dims[i] of the source, or a new one."""

    def move(one: Affine) -> Affine:
        lost = [one.slopes[d] for d in range(source.dim()) if d not in dims]
        assert not any(lost)
        slopes = [0 if d is None else one.slopes[d] for d in dims]
        return affine(one.offset, slopes, val.shape)

    return mapped(value, move)


def mapped(value: Any, change: Callable[[Affine], Affine]) -> Any:
    """A value with every Affine in it changed."""
    if isinstance(value, Affine):
        return change(value)
    if isinstance(value, tuple):
        return tuple(mapped(one, change) for one in value)
    if not is_dataclass(value) or isinstance(value, type):
        return value
    parts = {one.name: mapped(getattr(value, one.name), change) for one in fields(value)}
    return replace(value, **parts)


def broadcast(operand: Indexed, val: torch.Tensor) -> Value:
    new = val.dim() - operand.fake.dim()
    return moved(operand.value, operand.fake, [None] * new + list(range(operand.fake.dim())), val)


def chosen(value: Value, fake: torch.Tensor) -> Value:
    """The same tensor as a choice by conditions, where it is of unknown booleans."""
    if isinstance(value, Elements) and fake.dtype == torch.bool:
        return Piecewise((Holds(value),), True, False)
    return value


def flipped(value: Piecewise) -> Piecewise:
    """The same tensor by the opposite condition, where there is one that is so written."""
    if len(value.conditions) != 1:
        return value
    (condition,) = value.conditions
    if not isinstance(condition, Condition) or condition.equal:
        return value
    left = condition.left
    opposite = Affine(-left.offset - 1, tuple(-slope for slope in left.slopes))
    return Piecewise((Condition(opposite),), value.no, value.yes)
