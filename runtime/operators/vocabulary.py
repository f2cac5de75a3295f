"""Embedding, losses and softmax over a vocabulary (classes) sharded by torch.chunk's rule.

Nothing of vocabulary size crosses the axis: a lookup leaves a partial sum, a loss reduces a
maximum and one packed sum a token; softmax and its kin, over any sharded dim, a maximum and a sum.
The algorithm is that of Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053, section 3).

A mean over the tokens of all data-parallel ranks, whose numbers differ: a rank may have no token
that counts, whose own mean would be 0 / 0, and NaN times its share of nothing is NaN on every rank.
So it computes a mean over stand-ins, which is finite, and takes nothing of it.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from autoshard.runtime.collectives import Axis, all_reduce, chunk_bounds

NONE, MEAN, SUM = 0, 1, 2  # at::Reduction

aten = torch.ops.aten


def vocab_parallel_embedding(
    weight: torch.Tensor,
    indices: torch.Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
    *,
    rows: int,
    axis: Axis,
) -> torch.Tensor:
    """aten.embedding where `weight` holds this rank's rows of a table of `rows`; partial result.

    indices: any shape, global row numbers. Result: their shape + [columns of weight], zero where
    the row is another rank's.
    """
    start, length = chunk_bounds(rows, axis)
    local = indices - start
    owned = (local >= 0) & (local < length)
    # the start of a graph for every rank is a tensor, which is compared only where there is a need
    own = padding_idx >= 0 and start <= padding_idx < start + length
    padding = padding_idx - start if own else -1
    found = torch.embedding(weight, local.clamp(0, length - 1), padding)
    return found.masked_fill(~owned.unsqueeze(-1), 0)


class _TokenLosses(torch.autograd.Function):
    """Scores [..., classes of this rank] -> losses [...] of each token, the same on every rank.

    Returns -log p(target) and, given `share` (a weight for each class of this rank, `whole` being
    its sum over all ranks), also the weighted sum of -log p over the classes.
    """

    @staticmethod
    def forward(
        ctx: Any,
        scores: torch.Tensor,
        local: torch.Tensor,
        owned: torch.Tensor,
        share: torch.Tensor | None,
        whole: torch.Tensor | None,
        axis: Axis,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        wide = _widened(scores)
        top = all_reduce(wide.amax(-1), "max", axis)
        shifted = wide - top.unsqueeze(-1)
        picked = shifted.gather(-1, local.unsqueeze(-1)).squeeze(-1).masked_fill(~owned, 0)
        sums = [shifted.exp().sum(-1), picked]
        if share is not None:
            sums.append((shifted * share).sum(-1))
        total = all_reduce(torch.stack(sums), "sum", axis)
        log_sum = total[0].log()
        # the scores are alive anyway: saving them, not the probabilities, costs no memory
        ctx.save_for_backward(scores, top + log_sum, local, owned, share, whole)
        spread = None if whole is None else whole * log_sum - total[2]
        return log_sum - total[1], spread

    @staticmethod
    @once_differentiable  # autograd knows no derivative of the sum over the ranks in it
    def backward(
        ctx: Any, grad: torch.Tensor, grad_spread: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        scores, log_norm, local, owned, share, whole = ctx.saved_tensors
        probability = (_widened(scores) - log_norm.unsqueeze(-1)).exp()
        classes = torch.arange(scores.shape[-1], device=scores.device)
        is_target = (classes == local.unsqueeze(-1)) & owned.unsqueeze(-1)
        out = (probability - is_target.to(probability.dtype)) * grad.unsqueeze(-1)
        if share is not None and grad_spread is not None:
            out = out + (probability * whole - share) * grad_spread.unsqueeze(-1)
        return out.to(scores.dtype), None, None, None, None, None


def _widened(x: torch.Tensor) -> torch.Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def vocab_parallel_cross_entropy(
    scores: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    reduction: int = MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    *,
    classes: int,
    axis: Axis,
) -> torch.Tensor:
    """aten.cross_entropy_loss where `scores` holds this rank's classes; replicated result.

    scores: [classes] or [tokens, classes, ...], sharded on the class dim; target: class numbers,
    scores' shape without it. Scores of 16 bits are reduced in fp32 and the loss cast back.
    """
    start, length = chunk_bounds(classes, axis)
    local = target - start
    owned = (local >= 0) & (local < length)
    share = whole = None
    if label_smoothing:
        ones = torch.ones(classes, dtype=_widened(scores).dtype, device=scores.device)
        every = (ones if weight is None else weight.to(ones.dtype)) / classes
        share, whole = every.narrow(0, start, length), every.sum()
    last = scores if scores.dim() == 1 else scores.movedim(1, -1)
    losses, spread = _TokenLosses.apply(last, local.clamp(0, length - 1), owned, share, whole, axis)
    counted = token_weight(target, weight, ignore_index, losses.dtype)
    losses = losses * counted
    if spread is not None:
        valid = (target != ignore_index).to(losses.dtype)
        losses = (1 - label_smoothing) * losses + label_smoothing * valid * spread
    return _reduced(losses, counted, reduction).to(scores.dtype)


def vocab_parallel_nll(
    scores: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    reduction: int = MEAN,
    ignore_index: int = -100,
    *,
    classes: int,
    axis: Axis,
) -> torch.Tensor:
    """aten.nll_loss (and nll_loss_nd) where `scores` holds this rank's classes; partial result."""
    start, length = chunk_bounds(classes, axis)
    local = target - start
    owned = (local >= 0) & (local < length)
    last = scores if scores.dim() == 1 else scores.movedim(1, -1)
    picked = last.gather(-1, local.clamp(0, length - 1).unsqueeze(-1)).squeeze(-1)
    counted = token_weight(target, weight, ignore_index, scores.dtype)
    losses = -picked.masked_fill(~owned, 0) * counted
    return _reduced(losses, counted, reduction)


def token_weight(
    target: torch.Tensor, weight: torch.Tensor | None, ignore_index: int, dtype: torch.dtype
) -> torch.Tensor:
    """The weight of each token in a mean, of target's shape: its class' weight, 0 where ignored."""
    valid = (target != ignore_index).to(dtype)
    if weight is None:
        return valid
    return weight.to(dtype)[target.clamp(0, weight.shape[0] - 1)] * valid


def _reduced(losses: torch.Tensor, counted: torch.Tensor, reduction: int) -> torch.Tensor:
    if reduction == NONE:
        return losses
    return losses.sum() / counted.sum() if reduction == MEAN else losses.sum()


def rows_of_classes(
    scores: torch.Tensor, target: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """scores: [N, classes, ...], target: [N, ...], as [tokens, classes] and [tokens].

    A view of logits whose classes were last; the kernels for dims behind the classes copy them."""
    if scores.dim() < 3:
        return scores, target
    return scores.movedim(1, -1).flatten(0, -2), target.flatten()


def loss_over_tokens(
    scores: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    reduction: int = MEAN,
    ignore_index: int = -100,
    *more: Any,
    op: Callable[..., torch.Tensor],
    axis: Axis,
    outer: Axis | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """A loss over sharded tokens: this rank's sum, of a mean over the count of all ranks; partial.

    op: aten.cross_entropy_loss or aten.nll_loss. Tokens that are ignored do not count, so the
    count is only known across the axis: one all-reduce of a scalar. outer: another axis, over which
    the tokens were split before.
    """
    scores, target = rows_of_classes(scores, target)
    total = op(scores, target, weight, SUM, ignore_index, *more, **kwargs)
    if reduction == SUM:
        return total
    count = token_weight(target, weight, ignore_index, _widened(scores).dtype).sum()
    for one in (axis, outer):
        count = count if one is None else all_reduce(count, "sum", one)
    return (total / count).to(total.dtype)


def loss_over_tokens_and_classes(
    scores: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    reduction: int = MEAN,
    ignore_index: int = -100,
    *more: Any,
    op: Callable[..., torch.Tensor],
    classes: int,
    axis: Axis,
    outer: Axis,
    **kwargs: Any,
) -> torch.Tensor:
    """`loss_over_tokens` over the axis `outer`, where `axis` splits the classes; partial on
    `outer`, on `axis` as the sum over classes is."""
    by_classes: Callable[..., torch.Tensor] = vocab_parallel_nll
    if op is aten.cross_entropy_loss.default:
        by_classes = vocab_parallel_cross_entropy
    found: torch.Tensor = loss_over_tokens(
        scores,
        target,
        weight,
        reduction,
        ignore_index,
        *more,
        op=functools.partial(by_classes, classes=classes, axis=axis),
        axis=outer,
        **kwargs,
    )
    return found


def own_tokens(
    target: torch.Tensor, weight: torch.Tensor | None, ignore_index: int, split: tuple[Axis, ...]
) -> torch.Tensor:
    """Number of tokens of this data-parallel rank that count, float32; each with its class' weight.

    target: class numbers. split: axes over which the tokens of one batch are split.
    """
    own = token_weight(target, weight, ignore_index, torch.float32).sum()
    for axis in split:
        own = all_reduce(own, "sum", axis)
    return own


def stand_in_targets(target: torch.Tensor, own: torch.Tensor, ignore_index: int) -> torch.Tensor:
    """`target`; where no token counts, a class that is not ignored for all of them."""
    return torch.where(own > 0, target, 1 if ignore_index == 0 else 0)


def stand_in_weight(weight: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """The classes' `weight`; where no token counts, 1 for each."""
    return torch.where(own > 0, weight, 1)


def share_of_tokens(loss: torch.Tensor, own: torch.Tensor, ranks: tuple[Axis, ...]) -> torch.Tensor:
    """`loss`, the mean over this rank's tokens, times its tokens * ranks / tokens of all ranks.

    Gradients are averaged over the data-parallel ranks: the average of these is the gradient of
    the mean over every token, whoever holds it. One all-reduce of a number for each axis.

    own: what `own_tokens` found; a rank without tokens adds 0, in value and in gradient, and NaN
    where no rank has any, as the mean of an empty batch is. ranks: the data-parallel axes.
    """
    total, share = own, own
    for axis in ranks:
        total = all_reduce(total, "sum", axis)
        share = share * axis.size
    counted = torch.where(own > 0, loss, 0)
    return counted * (share / total).to(loss.dtype)


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
