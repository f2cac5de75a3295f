"""An axis of the device mesh as a rank sees it, and the two rules by which dims are split.

In chunks, as torch.chunk does; or in head-tail order: a dim in 2n chunks, of which rank r of n
holds chunks r and 2n - 1 - r.

    whole            0 1 2 3 4 5 6 7        (n = 2, chunks of two)
    in this order    0 1 6 7 2 3 4 5        rank 0: 0 1 6 7, rank 1: 2 3 4 5

A row of causal attention sees the rows before it, so that the last of n equal parts does 2n - 1
times the work of the first; one chunk of the head and one of the tail are the same on every rank.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


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
