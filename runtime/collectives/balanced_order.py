"""Head-tail order: a dim in 2n chunks, of which rank r of n holds chunks r and 2n - 1 - r.

    whole            0 1 2 3 4 5 6 7        (n = 2, chunks of two)
    in this order    0 1 6 7 2 3 4 5        rank 0: 0 1 6 7, rank 1: 2 3 4 5

A row of causal attention sees the rows before it, so that the last of n equal parts does 2n - 1
times the work of the first; one chunk of the head and one of the tail are the same on every rank.
"""

from __future__ import annotations

import torch

from autoshard.runtime.collectives.axis import Axis


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
