"""Optimizers that exist already when parameters become shards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

Store = Callable[[torch.Tensor], torch.Tensor]


def repoint(
    optimizer: Optimizer,
    old: nn.Parameter,
    new: nn.Parameter,
    shape: torch.Size,
    shard: Store,
    replicate: Store,
) -> None:
    """Make `optimizer` hold `new` where it held `old`, in its groups and in its state.

    shape: the global shape. State of that shape (moments) goes through `shard`; other tensors
    (factored moments, say) through `replicate`, as the optimizer itself would create them from a
    DTensor; step counters and scalars stay as they are.
    """
    for group in optimizer.param_groups:
        held = group["params"]
        for index, parameter in enumerate(held):
            if parameter is old:
                held[index] = new
    if old in optimizer.state:
        # the same dict: a step that is under way (L-BFGS calls the model in its step) holds it
        state = optimizer.state.pop(old)
        for name, value in list(state.items()):
            state[name] = _move(name, value, shape, shard, replicate)
        optimizer.state[new] = state


def state_summary(optimizer: Optimizer, parameter: nn.Parameter) -> list[str]:
    """The optimizer's state of a parameter: names and shapes, for ranks to compare."""
    state: Mapping[str, Any] = optimizer.state[parameter] if parameter in optimizer.state else {}
    return [
        f"{name} {tuple(value.shape)}" if isinstance(value, torch.Tensor) else name
        for name, value in state.items()
    ]


def _move(name: str, value: Any, shape: torch.Size, shard: Store, replicate: Store) -> Any:
    if not isinstance(value, torch.Tensor) or name == "step":
        return value
    if value.shape == shape:
        return shard(value)
    return replicate(value) if value.dim() else value
