"""Reductions over a sharded dim whose partial results need a weight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from autoshard.runtime.collectives import Axis


def share_of_mean(
    x: torch.Tensor,
    *args: Any,
    op: Callable[..., torch.Tensor],
    sharded_dim: int,
    extent: int | None,
    axis: Axis,
    **kwargs: Any,
) -> torch.Tensor:
    """This rank's part of a mean over the sharded dim; the parts sum to the mean.

    extent: rows of the whole dim; None where it is symbolic, and then in equal shares.
    """
    weight = 1 / axis.size if extent is None else x.shape[sharded_dim] / extent
    return op(x, *args, **kwargs) * weight


def share_of_equal_mean(
    *args: Any, op: Callable[..., torch.Tensor], axis: Axis, **kwargs: Any
) -> torch.Tensor:
    """This rank's part of a mean over equal shares, whatever the operator computes before it."""
    return op(*args, **kwargs) / axis.size
