"""Operators that work on a rank's part of a split tensor as on the whole: what happens to caches.

A cache is cropped, reordered, repeated and converted without a collective, as long as that leaves
the dim alone along which it is split. The likeliest token of logits that are split by words needs
one number and one index a rank, not the logits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from autoshard.runtime.collectives import Axis, all_gather, chunk_bounds

aten = torch.ops.aten


class OnPart(NamedTuple):
    """The arguments after the first that an operator takes on a part, and the split dim of its
    result."""

    args: tuple[Any, ...]
    dim: int


COPIES = (
    aten.clone.default,
    aten._to_copy.default,
    aten.index_select.default,
    aten.index.Tensor,
)
"""Operators whose result has memory of its own."""

VIEWS = (
    aten.slice.Tensor,
    aten.select.int,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.expand.default,
    aten.view.default,
)
"""Operators whose result is a view."""

JOINS = (aten.cat.default, aten.stack.default)
"""Operators that copy several tensors into one."""

FILLS = (aten.zero_.default, aten.fill_.Scalar)
"""Operators that write the same number everywhere."""


def on_part(
    func: Any, shape: Sequence[int], dim: int, local: torch.Tensor, args: Sequence[Any]
) -> OnPart | None:
    """How one of COPIES or VIEWS works on a part; None where it needs the whole.

    shape: the whole's, which is split along `dim`. args: those after the tensor.
    """
    args, rank = tuple(args), len(shape)
    if func in (aten.clone.default, aten._to_copy.default):
        return OnPart(args, dim)
    if func in (aten.slice.Tensor, aten.index_select.default):
        along = (args[0] if args else 0) % rank
        return None if along == dim else OnPart(args, dim)
    if func is aten.select.int:
        along = args[0] % rank
        return None if along == dim else OnPart(args, dim - (along < dim))
    if func is aten.unsqueeze.default:
        return OnPart(args, dim + (args[0] % (rank + 1) <= dim))
    if func is aten.squeeze.dim:  # a split dim of two may be one of a part
        along = args[0] % rank
        return None if along == dim else OnPart(args, dim - (along < dim and shape[along] == 1))
    if func is aten.index.Tensor:
        return _indexed(dim, args)
    if func is aten.expand.default:
        if shape[dim] == 1:  # to be repeated along the split dim
            return None
        return _with_size(args, dim + len(args[0]) - rank, local.shape[dim])
    known = math.prod(size for size in args[0] if size != -1)
    sizes = [math.prod(shape) // known if size == -1 else size for size in args[0]]
    after = _dim_of_view(shape, dim, sizes)
    return None if after is None else _with_size((sizes,), after, local.shape[dim])


def split_dim_of_join(func: Any, rank: int, dim: int, along: int) -> int | None:
    """The split dim of what one of JOINS makes along another dim; None along the split dim itself.

    rank, dim: the number of dims of each tensor, and that along which it is split.
    """
    if func is aten.stack.default:
        return dim + (along % (rank + 1) <= dim)
    return None if along % rank == dim else dim


def _with_size(args: tuple[Any, ...], dim: int, size: int) -> OnPart:
    sizes = list(args[0])
    sizes[dim] = size
    return OnPart((sizes, *args[1:]), dim)


def _dim_of_view(shape: Sequence[int], dim: int, sizes: Sequence[int]) -> int | None:
    """The dim of a view that is `dim` of the whole, unsplit and joined to no other."""
    before = math.prod(shape[:dim])
    for after, size in enumerate(sizes):
        if size == shape[dim] and math.prod(sizes[:after]) == before:
            return after
    return None


def _indexed(dim: int, args: tuple[Any, ...]) -> OnPart | None:
    """Rows of one dim by their numbers; masks and several indices at once need the whole."""
    given = [(at, index) for at, index in enumerate(args[0]) if index is not None]
    if len(given) != 1:
        return None
    ((at, index),) = given
    if at == dim or index.dtype in (torch.bool, torch.uint8):
        return None
    return OnPart(args, dim + (index.dim() - 1) * (at < dim))


def argmax_of_parts(
    local: torch.Tensor, dim: int, keepdim: bool, axis: Axis, extent: int
) -> torch.Tensor:
    """torch.argmax along the split dim: each rank's greatest value and its place are gathered.

    Of equal values the first counts, as in torch. extent: of the dim in the whole.
    """
    place = local.argmax(dim, keepdim=True)
    value = local.gather(dim, place)
    # doubles hold every value of the narrower dtypes, and every place, exactly
    mine = torch.stack([value.double(), (place + chunk_bounds(extent, axis)[0]).double()])
    values, places = all_gather(mine, axis).unflatten(0, (axis.size, 2)).unbind(1)
    found = places.gather(0, values.argmax(0, keepdim=True))[0].long()
    return found if keepdim else found.squeeze(dim)
