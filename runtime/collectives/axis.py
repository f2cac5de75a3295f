"""An axis of the device mesh as a rank sees it, and the rule by which dims are split."""

from __future__ import annotations

from typing import NamedTuple


class Axis(NamedTuple):
    """A mesh axis: a NamedTuple, so that a graph node can hold it as an argument.

    `group` is the name of the process group (torch resolves it); a name that starts with
    "lockstep" runs all ranks in one process (see runtime/collectives/lockstep.py).
    """

    name: str
    size: int
    rank: int
    group: str


def chunk_size(extent: int, n: int) -> int:
    """Rows of every rank but the last ones: torch.chunk's (and DTensor's) rule."""
    return (extent + n - 1) // n


def chunk_bounds(extent: int, axis: Axis) -> tuple[int, int]:
    """(start, length) of this rank's rows of a dim of `extent` rows; the length may be 0."""
    chunk = chunk_size(extent, axis.size)
    start = min(extent, axis.rank * chunk)
    return start, min(extent, start + chunk) - start
