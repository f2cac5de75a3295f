"""An axis of the device mesh as a rank sees it, and the rule by which dims are split."""

from __future__ import annotations

from typing import NamedTuple


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
