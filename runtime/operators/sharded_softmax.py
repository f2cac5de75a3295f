"""softmax and its kin over a sharded dim: a maximum and a sum cross the axis, nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from autoshard.runtime.collectives import Axis, all_reduce


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, log: bool, axis: Axis) -> torch.Tensor:
        top = all_reduce(x.amax(dim, keepdim=True), "max", axis)
        shifted = x - top
        total = all_reduce(shifted.exp().sum(dim, keepdim=True), "sum", axis)
        out = shifted - total.log() if log else shifted.exp() / total
        ctx.save_for_backward(out)
        ctx.of = (dim, log, axis)
        return out

    @staticmethod
    @once_differentiable  # autograd knows no derivative of the collectives in it
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (out,) = ctx.saved_tensors
        dim, log, axis = ctx.of
        summed = grad if log else grad * out
        total = all_reduce(summed.sum(dim, keepdim=True), "sum", axis)
        return (grad - out.exp() * total if log else summed - out * total), None, None, None


def _run(
    x: torch.Tensor, dim: int, dtype: torch.dtype | None, log: bool, axis: Axis
) -> torch.Tensor:
    wanted = x.dtype if dtype is None else dtype
    wide = torch.float32 if wanted in (torch.float16, torch.bfloat16) else wanted
    out: torch.Tensor = _Softmax.apply(x.to(wide), dim, log, axis)
    return out.to(wanted)


def softmax(
    x: torch.Tensor, dim: int, dtype: torch.dtype | None = None, *, axis: Axis
) -> torch.Tensor:
    """aten.softmax.int where `x` is this rank's shard along `dim`."""
    return _run(x, dim, dtype, False, axis)


def log_softmax(
    x: torch.Tensor, dim: int, dtype: torch.dtype | None = None, *, axis: Axis
) -> torch.Tensor:
    """aten.log_softmax.int where `x` is this rank's shard along `dim`."""
    return _run(x, dim, dtype, True, axis)


class _LogSumExp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, axis: Axis) -> torch.Tensor:
        top = all_reduce(x.amax(dim, keepdim=True), "max", axis)
        top = top.masked_fill(top.isinf(), 0)  # a row of -inf has the sum 0
        total = all_reduce((x - top).exp().sum(dim, keepdim=True), "sum", axis)
        out = total.log() + top
        ctx.save_for_backward(x, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, out = ctx.saved_tensors
        return grad * (x - out.masked_fill(out.isinf(), 0)).exp(), None, None


def logsumexp(
    x: torch.Tensor, dim: Sequence[int] | int, keepdim: bool = False, *, axis: Axis
) -> torch.Tensor:
    """aten.logsumexp over one dim, where `x` is this rank's shard along it; replicated result."""
    (d,) = dim if isinstance(dim, Sequence) else (dim,)
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    out: torch.Tensor = _LogSumExp.apply(wide, d, axis)
    return (out if keepdim else out.squeeze(d)).to(x.dtype)
