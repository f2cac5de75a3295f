"""A cross entropy by chunks, with the gradients that its operator has made beside it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from autoshard.runtime.chunked_loss.operator import CHUNKED_LOSS
from autoshard.runtime.collectives import Axis, all_reduce
from autoshard.runtime.operators import MEAN, token_weight


class _Sum(torch.autograd.Function):
    """The sum of the losses, over `count` where that is given."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        class_weight: Tensor | None,
        count: Tensor | None,
        *options: Any,
    ) -> Tensor:
        total, *found = CHUNKED_LOSS(hidden, weight, bias, target, class_weight, *options)
        ctx.save_for_backward(*found, count)
        ctx.dtypes = [None if x is None else x.dtype for x in (hidden, weight, bias)]
        made: Tensor = total if count is None else total / count
        return made

    @staticmethod
    @once_differentiable  # the gradients of the gradients are not at hand
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *found, count = ctx.saved_tensors
        # as torch has it: where no token counts, the mean is NaN and the gradients are 0
        scale = grad if count is None else torch.where(count == 0, 0, grad / count)
        gradients = [
            (x * scale).to(dtype) if needed else None
            for x, dtype, needed in zip(found, ctx.dtypes, ctx.needs_input_grad)
        ]
        return (*gradients, *[None] * (len(ctx.needs_input_grad) - len(gradients)))


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None = None,
    reduction: int = MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    *,
    functions: str,
    dtype: torch.dtype,
    classes: int,
    axis: Axis | None = None,
    over: tuple[Axis, ...] = (),
) -> Tensor:
    """aten.cross_entropy_loss of `linear(hidden, weight, bias)`, after `functions`, a sum or a
    mean, by chunks of rows (operator.py).

    hidden: [..., width]; target: its shape without width, or any other of as many tokens in the
    same order. functions: `row_functions.as_text`. dtype: of the loss. axis: splits the classes,
    of which there are `classes`; then the result is replicated on it. over: axes that split the
    tokens, on which the result is partial; a mean counts those of all ranks, one all-reduce of a
    number each.
    """
    rows, tokens = hidden.reshape(-1, hidden.shape[-1]), target.reshape(-1)
    count = None
    if reduction == MEAN:
        wide = torch.promote_types(dtype, torch.float32)
        count = token_weight(tokens, class_weight, ignore_index, wide).sum()
        for one in over:
            count = all_reduce(count, "sum", one)
    record = torch.is_grad_enabled()
    needs = [record and x is not None and x.requires_grad for x in (rows, weight, bias)]
    place = (0, 1, "") if axis is None else (axis.rank, axis.size, axis.group)
    options = (functions, ignore_index, label_smoothing, classes, needs, *place)
    found: Tensor = _Sum.apply(rows, weight, bias, tokens, class_weight, count, *options)
    return found.to(dtype)
