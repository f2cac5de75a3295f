"""An axis of the device mesh as a rank sees it, the two rules by which dims are split, and the axes
on which parameters are stored as shards.

Dims are split in chunks, as torch.chunk does; or in head-tail order: a dim in 2n chunks, of which
rank r of n holds chunks r and 2n - 1 - r.

    whole            0 1 2 3 4 5 6 7        (n = 2, chunks of two)
    in this order    0 1 6 7 2 3 4 5        rank 0: 0 1 6 7, rank 1: 2 3 4 5

A row of causal attention sees the rows before it, so that the last of n equal parts does 2n - 1
times the work of the first; one chunk of the head and one of the tail are the same on every rank.

Parameters are stored as shards, and gathered for their use, on the axes of data parallelism, and on
cp where it stands beside tp.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from autoshard.runtime.collectives.states import S, State, shard_dim


class Axis(NamedTuple):
    """A mesh axis: a NamedTuple, so that a graph node can hold it as an argument.

    `group` is the name of the process group (torch resolves it); a name that starts with
    "lockstep" runs all ranks in one process (see runtime/collectives/lockstep.py). In a graph that
    is compiled once for all ranks, `rank` is a tensor, a number (autoshard/compiling/any_rank.py).
    """

    name: str
    size: int
    rank: int
    group: str


def chunk_size(extent: int, n: int) -> int:
    """Rows of every rank but the last ones: torch.chunk's (and DTensor's) rule."""
    return (extent + n - 1) // n


def chunk_bounds(extent: int, axis: Axis) -> tuple[int, int]:
    """(start, length) of this rank's rows of a dim of `extent` rows; the length may be 0.

    Where the rank is a tensor, so is the start, and the axis divides the extent.
    """
    chunk = chunk_size(extent, axis.size)
    if not isinstance(axis.rank, int):
        return axis.rank * chunk, chunk
    start = min(extent, axis.rank * chunk)
    return start, min(extent, start + chunk) - start


def whole_shape(
    part: Sequence[Any], state: State, axis: Axis, extent: int | None = None
) -> list[Any]:
    """The shape of what a gather over the axis makes of a part. extent: as in `redistribute`."""
    shape, dim = list(part), shard_dim(state)
    if dim is not None:
        shape[dim] = shape[dim] * axis.size if extent is None else extent
    return shape


def head_tail(x: torch.Tensor, dim: int, n: int) -> torch.Tensor:
    """The rows of `dim`, which 2n divides, in the order of the ranks that hold them."""
    chunks = x.unflatten(dim, (2 * n, -1))
    heads, tails = chunks.narrow(dim, 0, n), chunks.narrow(dim, n, n).flip(dim)
    return torch.stack((heads, tails), dim + 1).flatten(dim, dim + 2)


def in_order(x: torch.Tensor, dim: int, n: int) -> torch.Tensor:
    """The inverse of `head_tail`."""
    chunks = x.unflatten(dim, (n, 2, -1))
    heads, tails = chunks.select(dim + 1, 0), chunks.select(dim + 1, 1).flip(dim)
    return torch.cat((heads, tails), dim).flatten(dim, dim + 1)


def own_chunks(axis: Axis) -> tuple[int, int]:
    """The chunks of 2n that this rank holds."""
    return axis.rank, 2 * axis.size - 1 - axis.rank


def own_head_and_tail(x: torch.Tensor, dim: int, axis: Axis) -> torch.Tensor:
    """This rank's rows of a whole dim."""
    rows = x.shape[dim] // (2 * axis.size)
    return torch.cat([x.narrow(dim, chunk * rows, rows) for chunk in own_chunks(axis)], dim)


#: Outermost first; `ep` is one more axis of shards, on which experts are not gathered. A parameter
#: is gathered in this order's reverse of storage: the replicas' axis first, so that backward
#: scatters over the shards' before it reduces the small shard.
DATA_AXES = ("dp_replicate", "dp_shard", "ep")

_SHARDS = ("dp_shard", "ep")

WHOLE, ONCE, TWICE = "whole", "once", "twice"
"""What `dp_shard` may do with one weight: every rank stores it whole; or it is split, and gathered
once, and kept until backward, or gathered for forward and again for backward."""

CHOICES = (TWICE, ONCE, WHOLE)
"""Those, the one that takes least memory first."""


def data_axes(axes: Sequence[Axis]) -> tuple[Axis, ...]:
    """The data-parallel axes of more than one rank, in the order of DATA_AXES."""
    return tuple(axis for axis in axes if axis.name in DATA_AXES and axis.size > 1)


def outer_axis(axes: Sequence[Axis]) -> Axis | None:
    """cp where tp or pp has several ranks too: it is planned first, and stores weights as dp_shard
    does; None on other meshes."""
    sizes = {axis.name: axis.size for axis in axes}
    both = sizes.get("cp", 1) > 1 and max(sizes.get("tp", 1), sizes.get("pp", 1)) > 1
    return next(axis for axis in axes if axis.name == "cp") if both else None


def gathering_axes(axes: Sequence[Axis]) -> tuple[Axis, ...]:
    """The axes over which a stored parameter is gathered before the planned one, in that order."""
    outer = outer_axis(axes)
    return data_axes(axes) if outer is None else (*data_axes(axes), outer)


def data_states(ndim: int, axes: Sequence[Axis], choice: str = "") -> dict[str, State]:
    """The stored state of a parameter of `ndim` dims on each axis of `gathering_axes`. choice: what
    was chosen for it on dp_shard, one of CHOICES; "": it is split.

    Whole on `dp_replicate`; rows split over `ep`, then over `dp_shard`, as FSDP2 stores them, and
    before both over a cp that stands beside tp or pp, where a vector is whole. A scalar has no
    rows, and is whole on all. An axis that is not named is I.
    """
    split = [name for name in _SHARDS if name != "dp_shard" or choice != WHOLE]
    found = {axis.name: S(0) for axis in data_axes(axes) if axis.name in split and ndim}
    outer = outer_axis(axes)
    return found if outer is None or ndim < 2 else {**found, outer.name: S(0)}


def deferred_axes(axes: Sequence[Axis], zero: int | str, defer_reduction: bool) -> tuple[str, ...]:
    """The data-parallel axes over which `no_sync` does not reduce.

    Over `dp_replicate` it never does. ZeRO-1 keeps whole gradients, and so waits on `dp_shard` and
    `ep` too; ZeRO-2 and 3 hold shards of gradients only, unless the caller chose to wait.
    """
    waits = {"dp_replicate", *(_SHARDS if zero == 1 or defer_reduction else ())}
    return tuple(axis.name for axis in data_axes(axes) if axis.name in waits)
