"""A mean loss over the tokens of all data-parallel ranks, where their numbers differ."""

from __future__ import annotations

import torch

from autoshard.runtime.axis import Axis
from autoshard.runtime.collectives import all_reduce
from autoshard.runtime.vocab_parallel import token_weight


def share_of_tokens(
    loss: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    ignore_index: int,
    split: tuple[Axis, ...],
    ranks: tuple[Axis, ...],
) -> torch.Tensor:
    """`loss`, the mean over this rank's tokens, times its tokens * ranks / tokens of all ranks.

    Gradients are averaged over the data-parallel ranks: the average of these is the gradient of
    the mean over every token, whoever holds it. One all-reduce of a number for each axis.

    target: class numbers. split: axes over which the tokens of one batch are split. ranks: the
    data-parallel axes. As in a mean, a token counts with its class' weight.
    """
    own = token_weight(target, weight, ignore_index, torch.float32).sum()
    for axis in split:
        own = all_reduce(own, "sum", axis)
    total = own
    for axis in ranks:
        total = all_reduce(total, "sum", axis)
        own = own * axis.size
    return loss * (own / total).to(loss.dtype)
