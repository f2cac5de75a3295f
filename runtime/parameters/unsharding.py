"""Stored shards become tensors: the whole by `unshard_parameter`, the own part by `unwrap`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from autoshard.runtime import compat
from autoshard.runtime.collectives import (
    DATA_AXES,
    Axis,
    I,
    broadcast,
    data_axes,
    home_rank,
    redistribute,
    whole_shape,
)
from autoshard.runtime.mesh import axes_of
from autoshard.runtime.parameters.data_unsharding import (
    ACCUMULATE,
    SINGLE,
    deferred_at,
    unshard,
)
from autoshard.runtime.parameters.gradients import (
    GradientLayouts,
    accumulate,
    on_backward_done,
    unalias,
)
from autoshard.runtime.parameters.layout import (
    extents,
    in_strides,
    local_bounds,
    part_like,
    stored_states,
)
from autoshard.runtime.parameters.record import pending_of, policy_of


@compat.allow_in_graph
def unshard_parameter(
    parameter: torch.Tensor, microbatch: str = SINGLE, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """The whole plain tensor of a parameter, differentiable, in `dtype` if it is floating.

    The gradient that reaches a stored parameter is a DTensor of the parameter's own placements. On
    `tp` and `cp` the ranks compute the same with the whole weight, so backward takes this rank's
    slice; on a data-parallel axis they compute with different data, so backward reduces over the
    ranks, or adds to what is pending (`microbatch`, see `unshard`).

    One collective per axis on which the parameter is sharded: every rank of the mesh must call
    it. In a Dynamo graph it is one node, which the backend reads as the identity.
    """
    if not parameter.is_floating_point():
        dtype = None
    if not isinstance(parameter, DTensor):
        return parameter if dtype is None else parameter.to(dtype)
    if compat.transforming():  # whose constant the whole is: no collective is vectorized
        with compat.outside_transforms():
            return unshard_parameter(parameter, microbatch, dtype)
    states = stored_states(parameter)
    axes = axes_of(parameter.device_mesh)
    sizes = extents(parameter.shape, states, axes)
    uneven = {a.name: sizes[a.name] for a in axes if sizes.get(a.name, 0) % a.size}
    (x,) = unwrap(parameter)
    policy, pending = policy_of(parameter)._replace(param=None), pending_of(parameter)
    home = home_rank(states.get("pp", I))
    away = any(axis.name == "pp" and home not in (None, axis.rank) for axis in axes)
    data = () if away else data_axes(axes)  # where there are no rows, there is nothing to gather
    shared = [axis for axis in axes if axis.name not in DATA_AXES]
    if x.requires_grad and not data and all(states.get(a.name, I) == I for a in shared):
        x = _OwnGradient.apply(x)
    waits = None if pending is None or microbatch == SINGLE else deferred_at(data, policy)
    held: list[Any] = []
    root, outer = x, None
    for i, axis in enumerate(data):
        state, extent = states[axis.name], uneven.get(axis.name)
        last = i == len(data) - 1
        own = policy._replace(param=dtype) if last else policy
        if not last and dtype is not None and state != I:
            outer = state, axis, extent  # with the next, so that it is cast before
        elif waits is None or i > waits or not root.requires_grad:
            x = unshard(x, state, axis, extent, own, outer=outer)
        elif i == waits:
            assert pending is not None
            inner = x.shape if outer is None else whole_shape(x.shape, *outer)
            shape = whole_shape(inner, state, axis, extent)
            buffer = pending.take(shape, policy.pending_dtype(parameter.dtype), x.device)
            held.append((pending, buffer))
            x = unshard(x, state, axis, extent, own, buffer.data, microbatch, outer)
        elif microbatch != ACCUMULATE or state != I:
            x = unshard(x, state, axis, extent, own)
    if not data and dtype is not None:
        x = x.to(dtype)
    on_backward_done(root, held, microbatch)
    for axis in shared:
        if axis.name == "pp" and home is not None:
            inside = [one for one in shared if one is not axis]
            shape = [high - low for low, high in local_bounds(parameter.shape, states, inside)]
            x = _FromHome.apply(x, home, axis, shape)
            continue
        x = redistribute(x, states[axis.name], I, axis, uneven.get(axis.name))
    return x if parameter.is_contiguous() else in_strides(x, parameter.stride())


class _FromHome(torch.autograd.Function):
    """A parameter that one stage stores, on all of them; the gradient is the same on all. Its
    backward is `_ToHome`, and the other way round, where gradients are differentiated."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: torch.Tensor, home: int, axis: Axis, shape: Sequence[int]
    ) -> torch.Tensor:
        ctx.place = home, axis
        return broadcast(x.detach() if axis.rank == home else x.new_empty(shape), home, axis)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        return _ToHome.apply(grad, *ctx.place), None, None, None


class _ToHome(torch.autograd.Function):
    """What is the same on all stages, on the one that stores it."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, home: int, axis: Axis) -> torch.Tensor:  # type: ignore[override]
        ctx.place, ctx.shape = (home, axis), whole.shape
        own = whole if axis.rank == home else whole.narrow(0, 0, 0)
        return own.clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        return _FromHome.apply(grad, *ctx.place, ctx.shape), None, None


class _OwnGradient(torch.autograd.Function):
    """Copies the gradient: autograd may have handed the same tensor to another parameter, too.

    `unalias` sees one parameter at a time here. For where nothing reduces or cuts it.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad.clone(memory_format=torch.contiguous_format)


def unwrap(*parameters: DTensor, known: GradientLayouts | None = None) -> tuple[torch.Tensor, ...]:
    """The local tensors of stored parameters, through one autograd.Function for all of them.

    Backward wraps each local gradient in a DTensor of its parameter's placements; a parameter
    without gradient gets None. Frozen parameters give local tensors that need no gradient.
    known: see `unalias`; for parameters that go to one and the same graph each time.
    """
    return compat.apply(_Unwrap, known, *parameters) if parameters else ()


class _Unwrap(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, known: GradientLayouts | None, *parameters: DTensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.known, ctx.parameters = known, parameters
        # a fresh tensor object each: autograd marks what a Function returns
        local = compat.detached_locals(parameters)
        with compat.plain_attributes():
            frozen = [x for x, p in zip(local, parameters) if not p.requires_grad]
        if frozen:
            ctx.mark_non_differentiable(*frozen)
        return tuple(local)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[DTensor | None, ...]:  # type: ignore[override]
        if torch.is_grad_enabled() and any(g is not None and g.requires_grad for g in grads):
            pairs = zip(ctx.parameters, grads)
            made = [None if g is None else _WrapGradient.apply(g, (p,)) for p, g in pairs]
        else:
            own = zip(ctx.parameters, unalias(grads, ctx.known))
            made = [None if g is None else compat.dtensor_like(p, g) for p, g in own]
        return None, *accumulate(ctx, ctx.parameters, made)


class _WrapGradient(torch.autograd.Function):
    """The backward of `_Unwrap` where it is differentiated again: each is the other's backward."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, grad: torch.Tensor, of: tuple[DTensor]
    ) -> DTensor:
        (ctx.parameter,) = of  # in a tuple: it is no operand
        grad = grad.detach()
        return compat.dtensor_like(ctx.parameter, grad.to_dense() if grad.is_sparse else grad)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, None]:  # type: ignore[override]
        parameter: DTensor = ctx.parameter
        with compat.plain_attributes():
            if not isinstance(grad, DTensor):
                grad = part_like(grad, parameter)
            elif tuple(grad.placements) != tuple(parameter.placements):
                grad = grad.redistribute(placements=parameter.placements)
        return unwrap(grad)[0], None
