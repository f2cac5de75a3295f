"""The axes on which parameters are stored as shards and gathered for their use: those of data
parallelism, and cp where it stands beside tp."""

from __future__ import annotations

from collections.abc import Sequence

from autoshard.runtime.collectives.axis import Axis
from autoshard.runtime.collectives.states import S, State

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
