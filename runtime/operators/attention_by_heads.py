"""Attention by heads as one operator: heads are exchanged for rows of the sequence and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from autoshard.runtime.collectives import Axis, S, redistribute


def attend_by_heads(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *args: Any,
    op: Callable[..., torch.Tensor],
    axis: Axis,
    **kwargs: Any,
) -> torch.Tensor:
    """Attention where each rank holds its rows of all sequences, of every head that it is given.

    Which heads those are is the caller's affair: another axis may have split them before, and each
    of its ranks exchanges its own. The axis divides their number, of queries and of keys.
    """
    heads, rows = S(query.dim() - 3), S(query.dim() - 2)
    own = (redistribute(x, rows, heads, axis) for x in (query, key, value))
    return redistribute(op(*own, *args, **kwargs), heads, rows, axis)
