"""A mean loss over the tokens of all data-parallel ranks, where their numbers differ.

A rank may have no token that counts: its own mean would be 0 / 0, and NaN times its share of
nothing is NaN on every rank. So it computes a mean over stand-ins, which is finite, and takes
nothing of it.
"""

from __future__ import annotations

import torch

from autoshard.runtime.collectives import Axis, all_reduce
from autoshard.runtime.operators.vocabulary import token_weight


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
