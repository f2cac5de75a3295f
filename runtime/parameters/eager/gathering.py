"""The whole of a stored tensor in eager code: a collective that every rank must run."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor, Replicate

from autoshard.runtime import compat
from autoshard.runtime.agreement import REPLICAS, announced
from autoshard.runtime.collectives import Axis
from autoshard.runtime.mesh import axes_of
from autoshard.runtime.parameters.gradients import microbatch_of
from autoshard.runtime.parameters.layout import in_strides, like
from autoshard.runtime.parameters.unsharding import unshard_parameter


def is_partial(x: DTensor) -> bool:
    """Whether the ranks' values are still to be reduced."""
    return any(placement.is_partial() for placement in compat.spec_of(x).placements)


def resolved(x: DTensor) -> DTensor:
    """`x`, reduced where it is Partial: once, so that what writes to it writes to the sum."""
    if not is_partial(x):
        return x
    with compat.plain_attributes():
        placements = [Replicate() if p.is_partial() else p for p in x.placements]
        found = x.redistribute(placements=placements)
        if x.requires_grad:  # its history is of the addend
            return found
        compat.set_stored(x, found)
        return x


READ_EVERYWHERE = (
    "Read it on every rank; to save on one rank, call autoshard.full_state_dict(model) on every "
    "rank, and write what the first one gets."
)


def gathered_axes(x: DTensor) -> tuple[Axis, ...]:
    """The axes on which the whole is more than the rank's part: a read meets the ranks of these."""
    placed = zip(axes_of(x.device_mesh), x.placements)
    return tuple(axis for axis, placement in placed if not placement.is_replicate())


def unsharded(x: DTensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The whole of a stored tensor, plain and differentiable, in `dtype` if it is floating."""
    local, device = compat.local_of(x), x.device_mesh.device_type
    if local.is_cpu and device != "cpu":  # an optimizer's state that lies on the host
        x = like(x, local.to(device))
    what = f"read of a stored tensor of shape {tuple(x.shape)}"
    with compat.plain_attributes():
        # a gradient that comes back through the read is reduced over all data-parallel axes; on
        # that of replicas a rank may read alone
        recorded = torch.is_grad_enabled() and x.requires_grad
        axes = axes_of(x.device_mesh) if recorded else gathered_axes(x)
        axes = tuple(axis for axis in axes if axis.name != REPLICAS)
    outside, plain = compat.outside_transforms(), compat.plain_attributes()
    with outside, plain, announced(what, axes, READ_EVERYWHERE):
        # what is gathered along an inner dim has other strides than `x` says
        whole = unshard_parameter(resolved(x), microbatch_of(x), dtype)
        return in_strides(whole, x.stride())
