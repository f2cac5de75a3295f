"""State changes: one function over one autograd.Function, and the collectives under it.

`redistribute(x, src, dst, axis)` moves a value from one placement state to another. Its forward
converts the value, its backward converts the gradient the other way; the table in
runtime/collectives/states.py says which collective or local step each conversion is.

AOTAutograd traces through it to `_c10d_functional` operators.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from autoshard.runtime.collectives import lockstep
from autoshard.runtime.collectives.axis import (
    Axis,
    chunk_bounds,
    chunk_size,
    head_tail,
    in_order,
    own_head_and_tail,
)
from autoshard.runtime.collectives.states import (
    I,
    S,
    State,
    conversions,
    forward_value,
    gradient_state,
    is_head_tail,
    shard_dim,
    step,
)

_c10d = torch.ops._c10d_functional


def _as_real(collective: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`collective`, to which a complex tensor is pairs of real numbers: gloo knows no others."""

    @functools.wraps(collective)
    def run(x: torch.Tensor, *args: Any) -> torch.Tensor:
        if not x.is_complex():
            return collective(x, *args)
        pairs = torch.view_as_real(x.resolve_conj().contiguous())
        return torch.view_as_complex(collective(pairs, *args))

    return run


@_as_real
def all_reduce(x: torch.Tensor, op: str, axis: Axis) -> torch.Tensor:
    """Reduce `x` over the axis with op "sum", "max" or "min"; every rank gets the result."""
    if axis.group.startswith(lockstep.PREFIX):
        parts = torch.stack(lockstep.exchange(axis, f"all_reduce {op} {tuple(x.shape)}", x))
        return getattr(parts, {"sum": "sum", "max": "amax", "min": "amin"}[op])(0)
    return _c10d.wait_tensor(_c10d.all_reduce(x.contiguous(), op, axis.group))


@_as_real
def all_gather(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """[r, ...] on each rank -> [n * r, ...], the ranks' rows in rank order."""
    if axis.group.startswith(lockstep.PREFIX):
        return torch.cat(lockstep.exchange(axis, f"all_gather {tuple(x.shape)}", x))
    return _c10d.wait_tensor(_c10d.all_gather_into_tensor(x.contiguous(), axis.size, axis.group))


@_as_real
def broadcast(x: torch.Tensor, source: int, axis: Axis) -> torch.Tensor:
    """The value of rank `source`; on the others `x` says its shape."""
    if axis.group.startswith(lockstep.PREFIX):
        return lockstep.exchange(axis, f"broadcast {tuple(x.shape)}", x)[source]
    return _c10d.wait_tensor(_c10d.broadcast(x.contiguous(), source, axis.group))


@_as_real
def reduce_scatter(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """[n * r, ...] on each rank -> [r, ...]: the sum over ranks of this rank's rows."""
    if axis.group.startswith(lockstep.PREFIX):
        parts = lockstep.exchange(axis, f"reduce_scatter {tuple(x.shape)}", x)
        return torch.stack(parts).sum(0).tensor_split(axis.size)[axis.rank]
    return _c10d.wait_tensor(
        _c10d.reduce_scatter_tensor(x.contiguous(), "sum", axis.size, axis.group)
    )


@_as_real
def all_to_all(
    x: torch.Tensor, axis: Axis, rows: Sequence[Sequence[int]] | None = None
) -> torch.Tensor:
    """Block i of `x` goes to rank i; block j of the result is from rank j.

    rows[i][j]: rows that rank i sends to rank j; all the same where it is not given.
    """
    own = axis.rank
    if rows is None:
        rows = [[x.shape[0] // axis.size] * axis.size] * axis.size
    if axis.group.startswith(lockstep.PREFIX):
        parts = lockstep.exchange(axis, f"all_to_all {tuple(x.shape)}", x)
        return torch.cat([part.split(list(sent))[own] for part, sent in zip(parts, rows)])
    received = [sent[own] for sent in rows]
    return _c10d.wait_tensor(
        _c10d.all_to_all_single(x.contiguous(), received, list(rows[own]), axis.group)
    )


def _pad_to(x: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    missing = size - x.shape[dim]
    return F.pad(x, [0, 0] * (x.dim() - 1 - dim) + [0, missing])


def _slice(x: torch.Tensor, dim: int, axis: Axis) -> torch.Tensor:
    extent = x.shape[dim]
    if isinstance(axis.rank, torch.Tensor):  # in a graph of all ranks, which have as many rows
        rows = torch.arange(extent // axis.size, device=x.device)
        return x.index_select(dim, rows + axis.rank * rows.shape[0])
    if isinstance(extent, int):
        start, length = chunk_bounds(extent, axis)
    else:  # a sharded symbolic size is guarded to be divisible
        length = extent // axis.size
        start = axis.rank * length
    return x.narrow(dim, start, length)


def _gather(x: torch.Tensor, dim: int, axis: Axis, extent: int | None) -> torch.Tensor:
    if extent is not None:
        x = _pad_to(x, dim, chunk_size(extent, axis.size))
    shape = list(x.shape)
    whole = all_gather(x.reshape(-1) if x.dim() == 0 else x, axis)
    if dim:
        whole = whole.reshape(axis.size, *shape).movedim(0, dim)
        shape[dim] *= axis.size
        whole = whole.reshape(shape)
    return whole if extent is None else whole.narrow(dim, 0, extent)


def _blocks_first(x: torch.Tensor, dim: int, n: int) -> torch.Tensor:
    """Split `dim` into n blocks and lay them along dim 0, one after another."""
    if dim == 0:
        return x
    shape = list(x.shape)
    x = x.reshape(*shape[:dim], n, shape[dim] // n, *shape[dim + 1 :]).movedim(dim, 0)
    return x.reshape(n * shape[0], *shape[1:dim], shape[dim] // n, *shape[dim + 1 :])


def _reduce_scatter_dim(x: torch.Tensor, dim: int, axis: Axis) -> torch.Tensor:
    extent = x.shape[dim]
    uneven = isinstance(extent, int) and extent % axis.size != 0
    if uneven:
        x = _pad_to(x, dim, chunk_size(extent, axis.size) * axis.size)
    out = reduce_scatter(_blocks_first(x, dim, axis.size), axis)
    return out.narrow(dim, 0, chunk_bounds(extent, axis)[1]) if uneven else out


def convert(
    x: torch.Tensor, src: State, dst: State, axis: Axis, extent: int | None = None
) -> torch.Tensor:
    """Convert a value among I, P and S(d), with no autograd of its own.

    extent: the global size of the dim that `src` shards, given where the axis size does not
        divide it (torch.chunk's rule then says how many rows each rank holds); None means even.
    """
    kind, have, want = step(src, dst), shard_dim(src), shard_dim(dst)
    if kind is None:
        return x
    if is_head_tail(src) or is_head_tail(dst):
        return _convert_head_tail(x, src, dst, axis, extent)
    if kind == "scale":
        return x / axis.size
    if kind == "all_reduce":
        return all_reduce(x, "sum", axis)
    if have is None:
        assert want is not None
        return (_slice if kind == "slice" else _reduce_scatter_dim)(x, want, axis)
    if kind == "pad":
        return _pad(x, have, axis, extent)
    if want is None:
        return _gather(x, have, axis, extent)
    return _exchange_dims(x, have, want, axis, extent)


def _convert_head_tail(
    x: torch.Tensor, src: State, dst: State, axis: Axis, extent: int | None
) -> torch.Tensor:
    """`convert` from or to Z(d): that from or to S(d), with the whole dim reordered locally."""
    have, want = shard_dim(src), shard_dim(dst)
    if have == want or (is_head_tail(src) and is_head_tail(dst)):
        return convert(convert(x, src, I, axis, extent), I, dst, axis)
    if is_head_tail(src):
        assert have is not None
        return in_order(convert(x, S(have), dst, axis), have, axis.size)
    assert want is not None
    if src == I:
        return own_head_and_tail(x, want, axis)
    return convert(head_tail(x, want, axis.size), src, S(want), axis, extent)


def _pad(x: torch.Tensor, dim: int, axis: Axis, extent: int | None) -> torch.Tensor:
    """The shard in a tensor of the global size that is zero elsewhere."""
    total = x.shape[dim] * axis.size if extent is None else extent
    start = axis.rank * x.shape[dim] if extent is None else chunk_bounds(extent, axis)[0]
    before = [0, 0] * (x.dim() - 1 - dim)
    return F.pad(x, [*before, start, total - start - x.shape[dim]])


def _exchange_dims(
    x: torch.Tensor, have: int, want: int, axis: Axis, extent: int | None
) -> torch.Tensor:
    """From a shard of dim `have` to a shard of dim `want`."""
    wanted = x.shape[want]
    if extent is not None or (isinstance(wanted, int) and wanted % axis.size):
        return _slice(_gather(x, have, axis, extent), want, axis)
    blocks = all_to_all(_blocks_first(x, want, axis.size), axis)
    shape = list(x.shape)
    shape[want] //= axis.size
    blocks = blocks.reshape(axis.size, *shape).movedim(0, have)
    shape[have] *= axis.size
    return blocks.reshape(shape)


def reduce_wide(x: torch.Tensor, dst: State, axis: Axis, dtype: torch.dtype) -> torch.Tensor:
    """Reduce a partial value to I or S(d): it travels in its own dtype and is summed in `dtype`.

    The parts move by one all-to-all, the bytes of a reduce-scatter, and each rank sums what it
    received, in the order of ranks (Megatron-Core's reduce_scatter_with_fp32_accumulation). S(d)
    is returned in `dtype`; for I the sums are gathered again in the dtype of `x`, so that the bytes
    are those of an all-reduce.
    """
    dim = shard_dim(dst)
    whole = x.reshape(-1) if dim is None else x
    at = 0 if dim is None else dim
    extent = whole.shape[at]
    share = chunk_size(extent, axis.size)
    if share * axis.size != extent:
        whole = _pad_to(whole, at, share * axis.size)
    parts = all_to_all(_blocks_first(whole, at, axis.size), axis)
    total = parts.reshape(axis.size, -1, *parts.shape[1:]).to(dtype).sum(0)
    if dim is None:
        return all_gather(total.to(x.dtype), axis).narrow(0, 0, extent).reshape(x.shape)
    return total.narrow(dim, 0, chunk_bounds(extent, axis)[1])


class _Redistribute(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: torch.Tensor, src: State, dst: State, axis: Axis, extent: int | None
    ) -> torch.Tensor:
        want = shard_dim(dst)
        back_extent = None
        if want is not None and want != shard_dim(src):  # whole in x
            if isinstance(x.shape[want], int) and x.shape[want] % axis.size:
                back_extent = x.shape[want]
        forward, backward = conversions(src, dst)
        ctx.back = (*backward, axis, back_extent)
        ctx.states = src, dst
        out = convert(x, *forward, axis, extent)
        return x.view_as(x) if out is x else out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        if torch.is_grad_enabled() and grad.requires_grad:  # it is differentiated again
            src, dst = map(gradient_state, ctx.states)
            *_, axis, extent = ctx.back
            return redistribute(grad, dst, src, axis, extent), None, None, None, None
        if grad.is_sparse:  # of a sparse embedding
            grad = grad.to_dense()
        return convert(grad, *ctx.back), None, None, None, None


def redistribute(
    x: torch.Tensor, src: State, dst: State, axis: Axis, extent: int | None = None
) -> torch.Tensor:
    """Move `x` from state `src` to state `dst` on one mesh axis, forward and backward.

    x: the local value; its shape is the shard's where `src` is S(d), else the global one.
    extent: global size of the dim sharded by `src`, only where the axis does not divide it.
    """
    if src == dst or axis.size == 1:
        return x
    if not (x.is_floating_point() or x.is_complex()):
        return convert(x, forward_value(src), forward_value(dst), axis, extent)
    return _Redistribute.apply(x, src, dst, axis, extent)
