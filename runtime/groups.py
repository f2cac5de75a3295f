"""Operators with a number of groups, run on the groups of one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from autoshard.runtime.axis import Axis


def with_local_groups(
    *args: Any, op: Callable[..., torch.Tensor], position: int, axis: Axis, **kwargs: Any
) -> torch.Tensor:
    """Run `op` with its group count, the argument at `position`, divided by the axis size."""
    local = list(args)
    local[position] //= axis.size
    return op(*local, **kwargs)
