"""From stored shards to tensors: `materialize` makes the whole, `unwrap` takes the local part."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from autoshard.runtime import compat
from autoshard.runtime.collectives import change, unshard
from autoshard.runtime.mesh import axes_of
from autoshard.runtime.placement import R, State
from autoshard.runtime.storage import extents, shared, stored_states


@compat.allow_in_graph
def materialize(parameter: torch.Tensor) -> torch.Tensor:
    """The whole plain tensor of a stored parameter, differentiable; others as they are.

    The gradient that reaches the parameter is a DTensor of the parameter's own placements. On
    `tp` the ranks compute the same with the whole weight, so backward takes this rank's slice; on
    a data-parallel axis they compute with different data, so backward averages over the ranks.

    One collective per axis on which the parameter is sharded: every rank of the mesh must call
    it. In a Dynamo graph it is one node, which the backend reads as the identity.
    """
    if not isinstance(parameter, DTensor):
        return parameter
    states = stored_states(parameter)
    axes = axes_of(parameter.device_mesh)
    whole_sizes = extents(parameter.shape, states, axes)
    (x,) = unwrap(parameter)
    for axis in axes:
        state: State = states[axis.name]
        size = whole_sizes.get(axis.name)
        extent = size if size is not None and size % axis.size else None
        if axis.name == "tp":
            x = change(x, state, R, axis, extent)
        else:
            x = unshard(x, state, axis, extent)
    return x


def unwrap(*parameters: DTensor) -> tuple[torch.Tensor, ...]:
    """The local tensors of stored parameters, through one autograd.Function for all of them.

    Backward wraps each local gradient in a DTensor of its parameter's placements; a parameter
    without gradient gets None. Frozen parameters give local tensors that need no gradient.
    """
    return _Unwrap.apply(*parameters) if parameters else ()  # type: ignore[no-any-return]


class _Unwrap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *parameters: DTensor) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        ctx.set_materialize_grads(False)
        ctx.specs = [compat.spec_of(parameter) for parameter in parameters]
        # A fresh tensor object each: autograd marks what a Function returns.
        local = tuple(compat.local_of(parameter).detach() for parameter in parameters)
        frozen = [x for x, p in zip(local, parameters) if not p.requires_grad]
        if frozen:
            ctx.mark_non_differentiable(*frozen)
        return local

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[DTensor | None, ...]:  # type: ignore[override]
        return tuple(
            None if grad is None else compat.dtensor(grad, spec)
            for grad, spec in zip(shared(grads), ctx.specs)
        )
