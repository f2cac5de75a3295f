"""Operators with a number of groups, run on the groups of one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from autoshard.runtime.collectives import Axis


def with_local_groups(
    *args: Any, op: Callable[..., torch.Tensor], position: int, axis: Axis, **kwargs: Any
) -> torch.Tensor:
    """Run `op` with its group count, the argument at `position`, divided by the axis size."""
    local = list(args)
    local[position] //= axis.size
    return op(*local, **kwargs)


def attend_to_shared_head(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *args: Any,
    op: Callable[..., torch.Tensor],
    dim: int,
    axis: Axis,
    **kwargs: Any,
) -> torch.Tensor:
    """Attention where several ranks share a key head: each picks the one its queries attend to.

    query holds this rank's heads along `dim`; key and value hold all of theirs, fewer than ranks.
    """
    own = axis.rank * key.shape[dim] // axis.size
    return op(query, key.narrow(dim, own, 1), value.narrow(dim, own, 1), *args, **kwargs)
