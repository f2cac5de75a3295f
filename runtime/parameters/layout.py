"""Placement of a tensor's parts: states by axis <-> DTensor placements, whole <-> local.

A tensor is split over `tp` first, then over the data-parallel axes: the local part is
chunk(chunk(whole, tp), dp), bit for bit what FSDP2 over tensor parallelism stores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.graph import increment_version
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from autoshard.runtime import compat
from autoshard.runtime.collectives import (
    Axis,
    H,
    I,
    S,
    State,
    chunk_bounds,
    home_rank,
    placement_words,
    shard_dim,
    whole_shape,
)
from autoshard.runtime.errors import PlanError
from autoshard.runtime.mesh import axes_of, home_mesh, home_of_name


def stored_states(parameter: DTensor) -> dict[str, State]:
    """The state of a stored parameter on each axis of its mesh: I or S(d); on pp I or H(r)."""
    names = parameter.device_mesh.mesh_dim_names or ()
    found: dict[str, State] = {}
    for name, placement in zip(names, parameter.placements, strict=True):
        dim, home = compat.placement_dim(placement), home_of_name(name)
        if home is None:
            found[name] = I if dim is None else S(dim)
        else:
            found["pp"] = I if dim is None else H(home)
    return found


def placements_of(states: Mapping[str, State], axes: Sequence[Axis], ndim: int) -> list[Placement]:
    """DTensor placements, one an axis. An axis without a state is I.

    Raises PlanError for a state that cannot be stored: R, P, or a dim the tensor has not.
    """
    dims = [_stored_dim(states.get(axis.name, I), ndim) for axis in axes]
    found: list[Placement] = []
    for i, dim in enumerate(dims):
        if home_rank(states.get(axes[i].name, I)) is not None:
            found.append(compat.shard_placement(0, 1))
            continue
        if dim is None:
            found.append(Replicate())
            continue
        inner = 1
        for other, axis in zip(dims[i + 1 :], axes[i + 1 :]):
            inner *= axis.size if other == dim else 1
        found.append(compat.shard_placement(dim, inner))
    return found


def local_part(
    whole: torch.Tensor, states: Mapping[str, State], axes: Sequence[Axis]
) -> torch.Tensor:
    """This rank's part of a whole tensor, a view of it; uneven dims by torch.chunk's rule."""
    for dim, (low, high) in enumerate(local_bounds(whole.shape, states, axes)):
        if (low, high) != (0, whole.shape[dim]):
            whole = whole.narrow(dim, low, high - low)
    return whole


def local_bounds(
    shape: Sequence[int], states: Mapping[str, State], axes: Sequence[Axis]
) -> list[tuple[int, int]]:
    """(first, one past the last) index of a rank's part in the whole tensor, for each dim."""
    bounds = [(0, size) for size in shape]
    for axis in reversed(axes):
        dim = shard_dim(states.get(axis.name, I))
        if dim is not None:
            low, high = bounds[dim]
            start, length = chunk_bounds(high - low, axis)
            bounds[dim] = (low + start, low + start + length)
        elif home_rank(states.get(axis.name, I)) not in (None, axis.rank):
            bounds[0] = (bounds[0][0], bounds[0][0])
    return bounds


def owned(part: torch.Tensor) -> torch.Tensor:
    """`part`, or a copy of it where it is a view: contiguous, and alone in its storage.

    A slice would keep the whole alive; a DTensor around one has an offset that its copies, and
    the strides its metadata promises, do not allow.
    """
    alone = part.untyped_storage().nbytes() == part.numel() * part.element_size()
    if alone and part.is_contiguous():
        return part
    return part.clone(memory_format=torch.contiguous_format)


def extents(
    shape: Sequence[int], states: Mapping[str, State], axes: Sequence[Axis]
) -> dict[str, int]:
    """For each axis that shards: the size of the sharded dim that a gather over it restores."""
    sizes = list(shape)
    found: dict[str, int] = {}
    for axis in reversed(axes):
        dim = shard_dim(states.get(axis.name, I))
        if dim is not None:
            found[axis.name] = sizes[dim]
            sizes[dim] = chunk_bounds(sizes[dim], axis)[1]
    return found


def wrap_local(
    local: torch.Tensor,
    shape: torch.Size,
    states: Mapping[str, State],
    device_mesh: DeviceMesh,
    stride: Sequence[int] | None = None,
) -> DTensor:
    """A DTensor of global `shape` around this rank's part. No communication, no check.

    stride: of the whole, which code that reads it sees; a part is stored as rows all the same.
    """
    home = next((r for r in map(home_rank, states.values()) if r is not None), None)
    if home is not None:
        device_mesh = home_mesh(device_mesh, home)
    # from_local with shape and stride is the one constructor that is right for uneven and strided
    # shards; distribute_tensor refuses them.
    return DTensor.from_local(
        local,
        device_mesh,
        placements_of(states, axes_of(device_mesh), len(shape)),
        run_check=False,
        shape=shape,
        stride=tuple(stride or _contiguous_stride(shape)),
    )


def dense_stride(x: torch.Tensor) -> tuple[int, ...] | None:
    """The strides of a tensor without its gaps; None where it is stored as rows."""
    return None if x.is_contiguous() else torch.empty_like(x, device="meta").stride()


def in_strides(x: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    """`x` with its dims in memory as strides without gaps have them; a copy where it has others."""
    if x.stride() == tuple(stride):
        return x
    order = sorted(range(x.dim()), key=lambda dim: (stride[dim], x.shape[dim]), reverse=True)
    return x.permute(order).contiguous().permute([order.index(dim) for dim in range(x.dim())])


def like(x: DTensor, local: torch.Tensor) -> DTensor:
    """`local` as this rank's part of a tensor of the class, shape and placements of `x`."""
    made = compat.dtensor_like(x, local)
    if local.requires_grad:
        made.requires_grad_(True)
    return made


def part_like(whole: torch.Tensor, x: DTensor) -> DTensor:
    """A whole tensor cut and placed like `x`; every rank gives the same tensor."""
    states, mesh = stored_states(x), x.device_mesh
    part = local_part(whole.detach(), states, axes_of(mesh)).to(mesh.device_type)
    if whole.shape == x.shape:
        return like(x, owned(part))
    made = wrap_local(owned(part), whole.shape, states, mesh)
    made.__class__ = type(x)
    return made


def write_whole(whole: torch.Tensor, x: DTensor) -> None:
    """Store the part of a whole tensor in `x`; for code without autograd and attributes of ours."""
    compat.local_of(x).copy_(compat.local_of(part_like(whole, x)))
    increment_version(x)


def is_sharded(x: DTensor) -> bool:
    """Whether a rank holds a part of `x` only."""
    return any(not (p.is_replicate() or p.is_partial()) for p in compat.spec_of(x).placements)


def is_even(x: DTensor) -> bool:
    """Whether every rank's part of `x` is of one size."""
    parts = [1] * x.dim()
    if home_of(x) is not None:
        return False
    for axis, state in zip(axes_of(x.device_mesh), stored_states(x).values()):
        dim = shard_dim(state)
        if dim is not None:
            parts[dim] *= axis.size
    return all(size % n == 0 for size, n in zip(x.shape, parts))


def home_of(x: DTensor) -> int | None:
    """The rank of pp at which a stored tensor is at home; None where it is on none alone."""
    return home_rank(stored_states(x).get("pp", I))


def from_first_rank(whole: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """The values of the mesh's first rank, in place where `whole` is contiguous."""
    whole = whole.contiguous()
    data = whole.view(-1).view(torch.uint8)  # bytes: not every backend knows every dtype
    for axis in axes_of(mesh):
        if axis.size > 1:
            dist.broadcast(data, group=compat.process_group(axis.group), group_src=0)
    return whole


def as_dtensors(
    outputs: Sequence[Any],
    states: Sequence[State],
    sizes: Sequence[int | None],
    axis: Axis,
    device_mesh: DeviceMesh,
) -> tuple[Any, ...]:
    """Each output in state S(d) as a DTensor, differentiable; the others pass as they are.

    sizes: the global size of the sharded dim where it is static; None: the axis divides it.
    """
    return tuple(
        wrap_local(
            output,
            torch.Size(whole_shape(output.shape, state, axis, size)),
            {axis.name: state},
            device_mesh,
        )
        if isinstance(output, torch.Tensor) and shard_dim(state) is not None
        else output
        for output, state, size in zip(outputs, states, sizes, strict=True)
    )


def _contiguous_stride(shape: torch.Size) -> tuple[int, ...]:
    stride = [1]
    for size in reversed(shape[1:]):
        stride.append(stride[-1] * max(size, 1))
    return tuple(reversed(stride)) if shape else ()


def _stored_dim(state: State, ndim: int) -> int | None:
    dim = shard_dim(state)
    if home_rank(state) is not None and ndim:
        return None
    if (dim is None and state != I) or (dim is not None and dim >= ndim):
        raise PlanError(
            f"a parameter of {ndim} dims cannot be stored as {placement_words(state)}",
            remedy="Store it as Replicate, or as Shard(d) of one of its dims.",
        )
    return dim


def is_whole(p: torch.Tensor) -> bool:
    """Whether this rank, as every other, holds all of a parameter."""
    return not isinstance(p, DTensor) or all(
        compat.placement_dim(placement) is None for placement in p.placements
    )
