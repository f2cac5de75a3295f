"""The whole of a stored tensor in eager code: a collective that every rank must run."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from autoshard.runtime import compat
from autoshard.runtime.agreement import REPLICAS, announced
from autoshard.runtime.collectives import Axis
from autoshard.runtime.mesh import axes_of
from autoshard.runtime.parameters.accumulation import microbatch_of
from autoshard.runtime.parameters.eager.partial_reductions import resolved
from autoshard.runtime.parameters.layout import in_strides, like
from autoshard.runtime.parameters.unsharding import unshard_parameter

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
