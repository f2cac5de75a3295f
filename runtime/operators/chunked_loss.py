"""How many rows a chunk has, and the memory that it takes."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from autoshard.runtime.collectives import Axis, all_reduce, chunk_bounds, chunk_size
from autoshard.runtime.operators.row_functions import apply, copies_of, parsed, result_dtype
from autoshard.runtime.operators.vocabulary import MEAN, token_weight

_FEWEST_ROWS = 256
"""Below this a matrix product is too small to be quick."""


def rows_a_chunk(rows: int, classes: int, width: int) -> int:
    """Rows of which the logits are about as large as the whole hidden states.

    The rule of Liger Kernel (Hsu et al. 2024, arXiv:2410.10989, section 3.2): as many chunks as
    classes over width, the rows of one rounded up to a power of two. classes: those of the rank
    that has most, so that all ranks have the same chunks.
    """
    chunks = max(1, -(-classes // width))
    size = 1 << (-(-rows // chunks) - 1).bit_length() if rows > chunks else 1
    return max(size, _FEWEST_ROWS)


PARTS = 8
"""In which a chunk's product is added to a wider sum: the product is never whole."""


def scratch_bytes(
    rows: int, own: int, classes: int, width: int, wide: int, narrow: int, copies: int
) -> int:
    """Bytes that the operator has inside at most: what it makes of a chunk's logits, and a part of
    the weight's gradient.

    own: the rank's classes. classes: those of the rank that has most. wide, narrow: bytes of an
    element of the scores as the loss is computed, and of the weight. copies: `copies_of` what is
    between.
    """
    size = min(rows, rows_a_chunk(rows, classes, width))
    part = 0 if narrow == wide else -(-own // PARTS) * width * narrow
    return size * own * (wide + narrow * copies) + part


_library = torch.library.Library("autoshard", "FRAGMENT")
# As in runtime/randomness/operators.py: count up when the operator gives other numbers.
_VERSION = "v1"


def _chunked_loss(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    functions: str,
    ignore_index: int,
    label_smoothing: float,
    classes: int,
    needs: list[bool],
    rank: int,
    ranks: int,
    group: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    steps, eps = parsed(functions), label_smoothing
    axis = Axis("", ranks, rank, group)
    first, own = chunk_bounds(classes, axis)
    total, by_hidden, by_weight, by_bias = _results(hidden, weight, bias, functions, needs)
    for sums in (total, by_weight, by_bias):
        sums.zero_()
    wide = total.dtype
    share = whole = None
    if eps:
        each = torch.ones(classes, dtype=wide, device=hidden.device)
        each = (each if class_weight is None else class_weight.to(wide)) / classes
        share, whole = each.narrow(0, first, own), each.sum()
    rows = hidden.shape[0]
    size = rows_a_chunk(rows, chunk_size(classes, ranks), hidden.shape[1])
    for start in range(0, rows, size):
        h, t = hidden[start : start + size], target[start : start + size]
        applied = apply(F.linear(h, weight, bias), steps)
        x = applied.result.to(wide)
        top = x.amax(-1)
        if ranks > 1:
            top = all_reduce(top, "max", axis)
        x = x - top.unsqueeze(-1) if applied.keeps_result else x.sub_(top.unsqueeze(-1))
        at = t - first
        owned = (at >= 0) & (at < own)
        at = at.clamp(0, own - 1).unsqueeze(-1)
        picked = x.gather(-1, at).squeeze(-1).masked_fill(~owned, 0)
        spread = [] if share is None else [x @ share]
        x.exp_()
        sums = torch.stack([x.sum(-1), picked, *spread])
        if ranks > 1:
            sums = all_reduce(sums, "sum", axis)
        log_sum = sums[0].log()
        counted = (1 - eps) * token_weight(t, class_weight, ignore_index, wide)
        losses, scale = (log_sum - sums[1]) * counted, counted
        if share is not None and whole is not None:
            valid = eps * (t != ignore_index).to(wide)
            losses = losses + valid * (whole * log_sum - sums[2])
            scale = scale + valid * whole
        total += losses.sum()
        if any(needs):
            x.mul_((scale / sums[0]).unsqueeze(-1))
            x.scatter_add_(-1, at, -(counted * owned).unsqueeze(-1))
            if share is not None:
                x.addr_(valid, share, alpha=-1)
            x = applied.pull(x.to(applied.result.dtype))
        if needs[0]:
            torch.mm(x, weight, out=by_hidden[start : start + size])
        if needs[1]:
            _add_product(by_weight, x, h)
        if needs[2]:
            by_bias += x.sum(0, dtype=by_bias.dtype)
        del applied, x  # before the next chunk's logits are made
    return total, by_hidden, by_weight, by_bias


def _add_product(sums: Tensor, gradient: Tensor, h: Tensor) -> None:
    """sums += gradient.T @ h, in place."""
    if sums.dtype == h.dtype:
        sums.addmm_(gradient.t(), h)
        return
    step = -(-sums.shape[0] // PARTS)
    for part, of in zip(sums.split(step), gradient.split(step, 1)):
        part += of.t() @ h


def _results(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, functions: str, needs: list[bool]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Empty ones; a gradient that is not needed has no elements."""
    wide = torch.promote_types(result_dtype(hidden.dtype, parsed(functions)), torch.float32)
    sums = torch.promote_types(weight.dtype, torch.float32)
    return (
        hidden.new_empty((), dtype=wide),
        hidden.new_empty(hidden.shape if needs[0] else (0,)),
        weight.new_empty(weight.shape if needs[1] else (0,), dtype=sums),
        weight.new_empty(weight.shape[:1] if needs[2] else (0,), dtype=sums),
    )


def _chunked_loss_fake(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, *more: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _results(hidden, weight, bias, more[2], more[6])


_library.define(
    f"chunked_loss.{_VERSION}(Tensor hidden, Tensor weight, Tensor? bias, Tensor target, "
    "Tensor? class_weight, str functions, int ignore_index, float label_smoothing, int classes, "
    "bool[] needs, int rank, int ranks, str group) -> (Tensor, Tensor, Tensor, Tensor)"
)
_library.impl(f"chunked_loss.{_VERSION}", _chunked_loss, "CompositeExplicitAutograd")
torch.library.register_fake(f"autoshard::chunked_loss.{_VERSION}", _chunked_loss_fake, lib=_library)
CHUNKED_LOSS = getattr(torch.ops.autoshard.chunked_loss, _VERSION)


def scratch_of(rows: int, wide: torch.dtype, hidden: Tensor, weight: Tensor, *more: Any) -> int:
    """Bytes that the operator has inside at most: what it makes of a chunk's logits, and a part of
    the weight's gradient. wide: the dtype of its first result; then come its arguments."""
    own, width = weight.shape
    most = chunk_size(more[6], more[9])
    narrow = weight.dtype.itemsize
    return scratch_bytes(rows, own, most, width, wide.itemsize, narrow, copies_of(parsed(more[3])))


def reductions_of(rows: int, wide: torch.dtype, hidden: Tensor, *more: Any) -> list[int]:
    """Bytes of each all-reduce that the operator does, in order: of a chunk's maxima, and of its
    sums. wide: the dtype of its first result; then come its arguments."""
    smoothing, classes, ranks = more[6], more[7], more[10]
    size = rows_a_chunk(rows, chunk_size(classes, ranks), hidden.shape[1])
    lengths = [min(size, rows - start) for start in range(0, rows, size)]
    sums = 3 if smoothing else 2
    return [n * wide.itemsize * length for length in lengths for n in (1, sums)]


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
