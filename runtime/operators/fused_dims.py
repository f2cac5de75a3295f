"""A fused dim, [q | k | v] or [gate | up], sharded as one dim, made sharded part by part.

    rank 0, rank 1 of two     [q0 q1 k0] [k1 v0 v1]  ->  [q0 k0 v0] [q1 k1 v1]

so that the parts can be split off locally. Blocks move by one all-to-all of a shard's size, where
gathering the dim would move n times as much.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from autoshard.runtime.collectives import Axis, all_to_all


def _routes(sizes: Sequence[int], n: int) -> tuple[int, list[list[list[tuple[int, int]]]]]:
    """(rows of a block, routes[src][dst] = [(block at the source, block at the destination)])."""
    rows = math.gcd(*[size // n for size in sizes])
    held = sum(sizes) // n // rows
    routes: list[list[list[tuple[int, int]]]] = [[[] for _ in range(n)] for _ in range(n)]
    block = landed = 0
    for size in sizes:
        share = size // n // rows
        for dst in range(n):
            for i in range(share):
                routes[block // held][dst].append((block % held, landed + i))
                block += 1
        landed += share
    return rows, routes


def pieces(sizes: Sequence[int], n: int) -> int:
    """Blocks into which each rank cuts its shard."""
    return sum(sizes) // n // math.gcd(*[size // n for size in sizes])


def _move(x: torch.Tensor, dim: int, sizes: Sequence[int], axis: Axis, back: bool) -> torch.Tensor:
    block, routes = _routes(sizes, axis.size)
    # pairs[src][dst]: (block at src, block at dst) of each block that moves from src to dst
    pairs = routes
    if back:
        turned = [list(column) for column in zip(*routes)]
        pairs = [[[(b, a) for a, b in route] for route in row] for row in turned]
    x = x.movedim(dim, 0)
    sent = [pair[0] for route in pairs[axis.rank] for pair in route]
    rows = [[len(route) * block for route in row] for row in pairs]
    moved = all_to_all(torch.cat([x.narrow(0, at * block, block) for at in sent]), axis, rows)
    landed = [pair[1] for row in pairs for pair in row[axis.rank]]
    slots = sorted(range(len(landed)), key=landed.__getitem__)
    return torch.cat([moved.narrow(0, slot * block, block) for slot in slots]).movedim(0, dim)


class _Regroup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, dim: int, sizes: tuple[int, ...], axis: Axis, back: bool
    ) -> torch.Tensor:
        ctx.of = (dim, sizes, axis, not back)
        return _move(x, dim, sizes, axis, back)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _Regroup.apply(grad, *ctx.of), None, None, None, None


def regroup(x: torch.Tensor, dim: int, sizes: Sequence[int], axis: Axis) -> torch.Tensor:
    """From the rank's share of a dim of sum(sizes) rows to its share of each part, side by side.

    Every size must be a multiple of the axis size. Same shape as `x`.
    """
    out: torch.Tensor = _Regroup.apply(x, dim, tuple(sizes), axis, False)
    return out


def split_parts(
    x: torch.Tensor, *args: Any, sharded_dim: int, sizes: tuple[int, ...], axis: Axis, **kwargs: Any
) -> tuple[torch.Tensor, ...]:
    """aten.split, split_with_sizes and chunk along a sharded dim: the rank's share of each part.

    sizes: the global sizes of the parts. The operator's own arguments, which speak of the whole
    dim, are not looked at.
    """
    own = [size // axis.size for size in sizes]
    return torch.split(regroup(x, sharded_dim, sizes, axis), own, sharded_dim)


def with_parts(
    x: torch.Tensor,
    *args: Any,
    op: Callable[..., torch.Tensor],
    sharded_dim: int,
    sizes: tuple[int, ...],
    axis: Axis,
    **kwargs: Any,
) -> torch.Tensor:
    """Run `op` (a glu) on a sharded dim whose parts it treats differently."""
    return op(regroup(x, sharded_dim, sizes, axis), *args, **kwargs)


def unfold_parts(
    x: torch.Tensor, *args: Any, sharded_dim: int, shape: tuple[int, ...], axis: Axis, **kwargs: Any
) -> torch.Tensor:
    """A view of a sharded dim as [parts, rows, ...], sharded on rows afterwards.

    shape: the global sizes [parts, rows, ...] that the dim becomes.
    """
    parts, rows, *rest = shape
    whole = rows * math.prod(rest)
    out = regroup(x, sharded_dim, [whole] * parts, axis)
    before, after = x.shape[:sharded_dim], x.shape[sharded_dim + 1 :]
    return out.reshape(*before, parts, rows // axis.size, *rest, *after)
