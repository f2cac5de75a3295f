"""Operators on tensors that are functions of their indices: the function of each result."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch

from autoshard.passes.lib.index_values import (
    Affine,
    Condition,
    Difference,
    Elements,
    Indexed,
    Number,
    Piecewise,
    Value,
    affine,
    broadcast,
    chosen,
    constant,
    flipped,
    mapped,
    moved,
)
from autoshard.planning import Size, same, same_shape

aten = torch.ops.aten

# Making tensors


def _arange(val: torch.Tensor, *args: Any, **kwargs: Any) -> Value | None:
    start, _, step = (0, *args, 1) if len(args) == 1 else (*args, 1)[:3]
    if not isinstance(start, int) or not isinstance(step, int):
        return None
    return affine(start, (step,), val.shape)


def _filled(number: Number) -> Callable[..., Value]:
    return lambda val, *args, **kwargs: constant(number, val)


def _full(val: torch.Tensor, *args: Any, **kwargs: Any) -> Value | None:
    number = args[-1] if args else kwargs.get("fill_value")
    return constant(number, val) if isinstance(number, (bool, int, float)) else None


# Moving dims


def _same(val: torch.Tensor, x: Indexed, *args: Any, **kwargs: Any) -> Value | None:
    return x.value if val.dtype == x.fake.dtype and same_shape(val, x.fake) else None


def _unsqueeze(val: torch.Tensor, x: Indexed, dim: int) -> Value:
    dims: list[int | None] = list(range(x.fake.dim()))
    dims.insert(dim % val.dim(), None)
    return moved(x.value, x.fake, dims, val)


def _transpose(val: torch.Tensor, x: Indexed, first: int, second: int) -> Value:
    dims: list[int | None] = list(range(val.dim()))
    dims[first], dims[second] = dims[second], dims[first]
    return moved(x.value, x.fake, dims, val)


def _reshape(val: torch.Tensor, x: Indexed, *args: Any) -> Value | None:
    """Only dims of size 1 come or go; one number may take any shape."""
    if isinstance(x.value, Affine) and x.value.constant:
        return constant(x.value.offset, val)
    wide = [d for d, size in enumerate(x.fake.shape) if not (isinstance(size, int) and size == 1)]
    new = [d for d, size in enumerate(val.shape) if not (isinstance(size, int) and size == 1)]
    if len(wide) != len(new) or not all(
        same(x.fake.shape[a], val.shape[b]) for a, b in zip(wide, new)
    ):
        return None
    at = dict(zip(new, wide))
    return moved(x.value, x.fake, [at.get(d) for d in range(val.dim())], val)


def _slice(
    val: torch.Tensor,
    x: Indexed,
    dim: int = 0,
    start: Any = None,
    end: Any = None,
    step: int = 1,
) -> Value | None:
    start = 0 if start is None else start
    if not isinstance(start, int) or start < 0 or not isinstance(step, int):
        return None
    at = dim % x.fake.dim()

    def cut(one: Affine) -> Affine:
        slopes = [s * step if d == at else s for d, s in enumerate(one.slopes)]
        return affine(one.offset + one.slopes[at] * start, slopes, val.shape)

    return mapped(x.value, cut)


def _index(val: torch.Tensor, x: Indexed, indices: list[Any]) -> Value | None:
    """x[i, j, ...] with an affine index for each of the first dims."""
    if not all(isinstance(i, Indexed) for i in indices):
        return None
    for dim, index in enumerate(indices):
        if not isinstance(index.value, Affine) or index.fake.dtype == torch.bool:
            return None
        if not _inside(index.value, index.fake, x.fake.shape[dim]):
            return None
    joined = val.dim() - x.fake.dim() + len(indices)  # the dims that the indices have together

    def at(one: Affine) -> Affine:
        offset = one.offset
        slopes = [0] * joined + list(one.slopes[len(indices) :])
        for own, index in zip(one.slopes, indices):
            offset = offset + own * index.value.offset
            for d, slope in enumerate(index.value.slopes):
                slopes[joined - index.fake.dim() + d] += own * slope
        return affine(offset, slopes, val.shape)

    return mapped(x.value, at)


def _inside(index: Affine, fake: torch.Tensor, size: Size) -> bool:
    """Whether every element of an index is in [0, size)."""
    if index.constant and isinstance(size, int):
        return 0 <= index.offset < size
    along = [d for d, slope in enumerate(index.slopes) if slope]
    if index.offset == 0 and len(along) == 1 and index.slopes[along[0]] == 1:
        if same(fake.shape[along[0]], size):
            return True
    sizes = [fake.shape[d] for d in along]
    if not isinstance(size, int) or not all(isinstance(s, int) for s in sizes):
        return False
    ends = [index.slopes[d] * (int(s) - 1) for d, s in zip(along, sizes)]
    low, high = sum(min(0, e) for e in ends), sum(max(0, e) for e in ends)
    return index.offset + low >= 0 and index.offset + high < size


# Along a dim


def _diff(
    val: torch.Tensor,
    x: Indexed,
    n: int = 1,
    dim: int = -1,
    prepend: Indexed | None = None,
    append: Indexed | None = None,
) -> Value | None:
    """The step along `dim`, where the element before the first is one step less too."""
    if n != 1 or append is not None or not isinstance(x.value, Affine):
        return None
    step = x.value.slopes[dim]
    if prepend is not None:
        first, size = prepend.value, prepend.fake.shape[dim]
        if not isinstance(first, Affine) or not (isinstance(size, int) and size == 1):
            return None
        others = [s for d, s in enumerate(x.value.slopes) if d != dim % val.dim()]
        if [s for d, s in enumerate(first.slopes) if d != dim % val.dim()] != others:
            return None
        jump = x.value.offset - first.offset
        if isinstance(x.fake.shape[dim], int) and x.fake.shape[dim] == 1:
            step = int(jump)
        elif jump != step:
            return None
    return constant(step, val)


def _cumsum(val: torch.Tensor, x: Indexed, dim: int, **kwargs: Any) -> Value | None:
    if not isinstance(x.value, Affine) or not x.value.constant or val.dtype.is_floating_point:
        return None
    each = int(x.value.offset)
    slopes = [each if d == dim % val.dim() else 0 for d in range(val.dim())]
    return affine(each, slopes, val.shape)


def _triangle(sign: int) -> Callable[..., Value | None]:
    """tril (1) or triu (-1) of one number: kept where sign * (row + diagonal - column) >= 0."""

    def rule(val: torch.Tensor, x: Indexed, diagonal: int = 0) -> Value | None:
        if not isinstance(x.value, Affine) or not x.value.constant:
            return None
        slopes = [0] * (val.dim() - 2) + [sign, -sign]
        kept = Condition(affine(sign * diagonal, slopes, val.shape))
        return Piecewise((kept,), x.value.offset, constant(0, val).offset)

    return rule


# Comparing and joining


def _arithmetic(left: int, right: int) -> Callable[..., Value | None]:
    """left * a + right * b (times alpha) of affine integers."""

    def rule(val: torch.Tensor, a: Any, b: Any, *, alpha: int = 1) -> Value | None:
        x, y = _as_affine(a, val), _as_affine(b, val)
        if y is not None and y.constant and left == 1 and isinstance(alpha, int):
            if (elements := _as_elements(a, val)) is not None:
                return replace(elements, offset=elements.offset + right * alpha * int(y.offset))
        if x is None or y is None or (x.constant and y.constant) or not isinstance(alpha, int):
            return None
        return _sum(x, left, y, right * alpha, val.shape)

    return rule


def _sum(x: Affine, a: int, y: Affine, b: int, shape: Iterable[Size]) -> Affine:
    slopes = [a * s + b * t for s, t in zip(x.slopes, y.slopes)]
    return affine(a * x.offset + b * y.offset, slopes, shape)


def _as_affine(operand: Any, val: torch.Tensor) -> Affine | None:
    """An integer operand over the dims of the result `val`."""
    if isinstance(operand, int):
        return Affine(operand, (0,) * val.dim())
    if not isinstance(operand, Indexed) or operand.fake.dtype.is_floating_point:
        return None
    found = broadcast(operand, val)
    return found if isinstance(found, Affine) else None


def _as_elements(operand: Any, val: torch.Tensor) -> Elements | None:
    """Unknown integers over the dims of the result `val`."""
    if not isinstance(operand, Indexed) or operand.fake.dtype == torch.bool:
        return None
    found = broadcast(operand, val)
    return found if isinstance(found, Elements) else None


# kind -> (sign of a - b, what is added), or None for (in)equality
_COMPARED = {"ge": (1, 0), "gt": (1, -1), "le": (-1, 0), "lt": (-1, -1), "eq": None, "ne": None}


def _compared(kind: str) -> Callable[..., Value | None]:
    def rule(val: torch.Tensor, a: Any, b: Any) -> Value | None:
        x, y = _as_affine(a, val), _as_affine(b, val)
        how = _COMPARED[kind]
        if x is None or y is None:
            one, other = _as_elements(a, val), _as_elements(b, val)
            return None if one is None or other is None else _difference(one, other, kind)
        if x.constant and y.constant:
            return None
        if how is None:
            # equal steps leave one number, which is compared at once
            return _choice(Condition(_sum(x, 1, y, -1, val.shape), True), kind == "eq")
        sign, extra = how
        left = _sum(x, sign, y, -sign, val.shape)
        return _choice(Condition(Affine(left.offset + extra, left.slopes)), True)

    return rule


def _difference(one: Elements, other: Elements, kind: str) -> Value | None:
    if one.source is not other.source:
        return None
    how = _COMPARED[kind]
    if how is None:
        return Piecewise((Difference(one, other, True),), kind == "eq", kind != "eq")
    sign, extra = how
    more, less = (one, other) if sign > 0 else (other, one)
    return Piecewise((Difference(replace(more, offset=more.offset + extra), less),), True, False)


def _choice(condition: Condition, yes: bool) -> Value:
    left = condition.left
    if left.constant:
        holds = left.offset == 0 if condition.equal else left.offset >= 0
        return Affine(holds == yes, left.slopes)
    return Piecewise((condition,), yes, not yes)


def _both(val: torch.Tensor, a: Any, b: Any) -> Value | None:
    """The and of two masks."""
    if val.dtype != torch.bool or not isinstance(a, Indexed) or not isinstance(b, Indexed):
        return None
    masks = [chosen(broadcast(one, val), val) for one in (a, b)]
    # each true where its condition holds, if one condition says so
    x, y = (flipped(m) if isinstance(m, Piecewise) and not m.yes else m for m in masks)
    for one, other in ((x, y), (y, x)):
        if isinstance(one, Affine):
            return other if one.offset else one
    if not isinstance(x, Piecewise) or not isinstance(y, Piecewise):
        return None
    if (x.yes, x.no, y.yes, y.no) != (True, False, True, False):
        return None
    return Piecewise(tuple(dict.fromkeys((*x.conditions, *y.conditions))), True, False)


def _copied(val: torch.Tensor, x: Indexed, *args: Any, **kwargs: Any) -> Value | None:
    """A copy in another dtype: of positions an integer one, of numbers any."""

    def converted(number: Number) -> Number:
        return torch.tensor(number, dtype=x.fake.dtype).to(val.dtype).item()

    if isinstance(x.value, Piecewise):
        yes, no = converted(x.value.yes), converted(x.value.no)
        return Piecewise(x.value.conditions, yes, no) if yes != no else constant(yes, val)
    if isinstance(x.value, Elements):
        return x.value if val.dtype == x.fake.dtype else None
    if x.value.constant:
        return constant(converted(x.value.offset), val)
    return x.value


RULES: dict[Any, Callable[..., Value | None]] = {
    **dict.fromkeys((aten.arange.default, aten.arange.start, aten.arange.start_step), _arange),
    **dict.fromkeys((aten.ones.default, aten.ones_like.default, aten.new_ones.default), _filled(1)),
    **dict.fromkeys(
        (aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default), _filled(0)
    ),
    **dict.fromkeys((aten.full.default, aten.full_like.default, aten.new_full.default), _full),
    **dict.fromkeys((aten.scalar_tensor.default,), _full),
    **dict.fromkeys(
        (aten.alias.default, aten.clone.default, aten.detach.default, aten.contiguous.default),
        _same,
    ),
    **dict.fromkeys((aten.lift_fresh.default, aten.lift_fresh_copy.default), _same),
    **dict.fromkeys((aten.reshape.default, aten.view.default, aten._unsafe_view.default), _reshape),
    **dict.fromkeys((aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims), _reshape),
    **dict.fromkeys(
        (aten.__and__.Tensor, aten.bitwise_and.Tensor, aten.logical_and.default), _both
    ),
    aten.unsqueeze.default: _unsqueeze,
    aten.expand.default: lambda val, x, *args, **kwargs: broadcast(x, val),
    aten.transpose.int: _transpose,
    aten.permute.default: lambda val, x, order: moved(
        x.value, x.fake, [d % val.dim() for d in order], val
    ),
    aten.slice.Tensor: _slice,
    aten.index.Tensor: _index,
    aten.diff.default: _diff,
    aten.cumsum.default: _cumsum,
    aten.tril.default: _triangle(1),
    aten.triu.default: _triangle(-1),
    aten.add.Tensor: _arithmetic(1, 1),
    aten.sub.Tensor: _arithmetic(1, -1),
    aten.rsub.Scalar: _arithmetic(-1, 1),
    **dict.fromkeys((aten._to_copy.default, aten.to.dtype, aten.to.dtype_layout), _copied),
    **{
        overload: _compared(kind)
        for kind in _COMPARED
        for overload in (getattr(aten, kind).Tensor, getattr(aten, kind).Scalar)
    },
}
