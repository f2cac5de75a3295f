"""Numbers of many stored tensors that are reduced over the ranks at once: norms, sums, infinities.

A norm or sum stays what a rank has (Partial) until it is read. `clip_grad_norm_` takes one of each
gradient and stacks them, wherever each is split: the stack is one collective.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from autoshard.runtime import compat
from autoshard.runtime.agreement import CollectiveRegion, users_line, world_axis
from autoshard.runtime.collectives import Axis
from autoshard.runtime.mesh import axes_of
from autoshard.runtime.parameters.eager.gathering import is_partial

_OPERATORS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}


_Alike = dict[Any, dict[int, tuple[int, ...]]]
"""By how numbers of a vector are reduced: of each its place, and over which axes."""


def stacked(cls: type[DTensor], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """`torch.stack` of single values, some of them Partial: a plain vector; else NotImplemented."""
    values = args[0] if len(args) == 1 and not kwargs else None
    if not isinstance(values, (list, tuple)) or not any(
        type(v) is cls and is_partial(v) for v in values
    ):
        return NotImplemented
    alike: _Alike = {}
    kinds: dict[int, Any] = {}  # norms of one list share their specs
    with compat.plain_attributes():
        for i, value in enumerate(values):
            if not isinstance(value, torch.Tensor) or value.dim() or value.requires_grad:
                return NotImplemented
            if isinstance(value, DTensor):
                spec = compat.spec_of(value)
                if id(spec) not in kinds:
                    kinds[id(spec)] = _kind(spec)
                kind, over = kinds[id(spec)]
                if kind is NotImplemented:
                    return NotImplemented
                if over:
                    alike.setdefault(kind, {})[i] = over
        found = torch.stack([compat.local_of(v) if isinstance(v, DTensor) else v for v in values])
        _reduce(found, alike)
    return found


def _reduce(found: torch.Tensor, alike: _Alike) -> None:
    """Reduce entries of a vector, in one collective a kind."""
    for (axes, op, power), entries in alike.items():
        at = torch.tensor(list(entries), device=found.device)
        part = found[at]
        if part.is_floating_point():
            part = part.double()  # squares of half-precision norms
        part = _over_axes(part**power if power != 1 else part, op, [*entries.values()], axes)
        found[at] = (part ** (1 / power) if power != 1 else part).to(found.dtype)


def _kind(spec: Any) -> tuple[Any, tuple[int, ...]]:
    """How a number is reduced (its axes, the operator, of which power), and over which axes."""
    over = tuple(at for at, placement in enumerate(spec.placements) if placement.is_partial())
    how = {compat.reduction_of(spec.placements[at]) for at in over}
    if len(how) > 1 or not all(op in _OPERATORS for op, _ in how):
        return NotImplemented, over
    return (axes_of(spec.mesh), *next(iter(how), ())), over


def norms(
    cls: type[DTensor], func: Any, tensors: Sequence[Any], order: Any = 2, **kwargs: Any
) -> list[Any]:
    """`torch._foreach_norm`, without a dispatch a tensor where no gradient flows: then norms of the
    wholes, plain."""
    found = None
    with compat.plain_attributes():
        if not (kwargs or compat.compiling()) and order > 0:
            found = _norms_of_parts(cls, func, tensors, order)
    if found is not None:
        return found
    return [torch.linalg.vector_norm(x, order, **kwargs) for x in tensors]


def _norms_of_parts(
    cls: type[DTensor], func: Any, tensors: Sequence[Any], order: Any
) -> list[Any] | None:
    """None where some wait for a reduction themselves, gradients flow, or dtypes differ."""
    op, power = compat.reduction_of(compat.norm_placement(order))
    grad, parts = torch.is_grad_enabled(), []
    alike: _Alike = {}
    kinds: dict[Any, Any] = {}
    for at, x in enumerate(tensors):
        if grad and x.requires_grad:
            return None
        if type(x) is cls:
            spec = compat.spec_of(x)
            key = id(spec.mesh), spec.placements
            if key not in kinds:
                over = tuple(i for i, p in enumerate(spec.placements) if not p.is_replicate())
                if is_partial(x):
                    return None
                same = alike.setdefault((axes_of(spec.mesh), op, power), {}) if over else {}
                kinds[key] = over, same
            over, same = kinds[key]
            same[at] = over
            x = compat.local_of(x)
        elif isinstance(x, DTensor):
            return None
        # a rank without rows of a tensor adds nothing
        parts.append(x if x.numel() else x.new_zeros(1))
    if len({(x.dtype, x.device) for x in parts}) > 1:
        return None
    found = func(parts, order)
    if not alike:
        return list(found)
    whole = torch.stack(found)
    _reduce(whole, alike)
    return list(whole.unbind())


def unscaled(
    cls: type[DTensor], func: Any, tensors: Sequence[Any], found_inf: torch.Tensor, scale: Any
) -> None:
    """GradScaler's `_amp_foreach_non_finite_check_and_unscale_`: every rank learns of an infinity
    of any. DTensor's own asks along the axes of the list's first tensor alone."""
    with compat.plain_attributes(), torch.no_grad():
        parts = [compat.local_of(x) if type(x) is cls else x for x in tensors]
        func(parts, found_inf, scale)
        stored = [x for x in tensors if type(x) is cls]
        split: dict[tuple[Axis, ...], set[int]] = {}
        for x in stored:
            over = {at for at, p in enumerate(x.placements) if not p.is_replicate()}
            split.setdefault(axes_of(x.device_mesh), set()).update(over)
        for axes, over in split.items():
            found_inf.copy_(_over_axes(found_inf.view(1), "max", [tuple(over)], axes)[0])
        increment_version(stored)


def _over_axes(
    values: torch.Tensor, op: str, over: Sequence[tuple[int, ...]], axes: Sequence[Axis]
) -> torch.Tensor:
    """Numbers, each reduced over some of the axes: in one collective where that is one axis, or
    where all that are reduced over make the world. Of what is whole along an axis its first rank's
    counts."""
    used = sorted({at for each in set(over) for at in each if axes[at].size > 1})
    world = world_axis()
    spans = len(used) > 1 and math.prod(axes[at].size for at in used) == world.size
    with CollectiveRegion(f"the reduction of norms and sums at {users_line()}", axes):
        for together in [used] if spans else [[at] for at in used]:
            if op in ("sum", "avg"):
                first = {
                    each: all(axes[at].rank == 0 for at in together if at not in each)
                    for each in set(over)
                }
                counts = [first[each] for each in over]
                values = torch.where(torch.tensor(counts, device=values.device), values, 0)
            group = (world if spans else axes[together[0]]).group
            dist.all_reduce(values, _OPERATORS[op], group=compat.process_group(group))
    if op == "avg":
        sizes = [math.prod(axes[at].size for at in each) for each in over]
        values = values / torch.tensor(sizes, device=values.device)
    return values
