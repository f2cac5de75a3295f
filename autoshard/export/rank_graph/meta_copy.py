"""A copy of a model without memory: what an exporter traces in another dtype than the model's.

Parameters and buffers become tensors of one repeated number on the CPU, whole where the model
stores shards: a tensor that forward makes without naming a device is on the CPU too. A Hugging Face
mixture of experts is told to run every expert on every token (experts/every_token.py), a form of it
without sorting and without sizes that depend on the data.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from autoshard.export.rank_graph.experts import all_experts
from autoshard.export.serial_graph import unwrapped
from autoshard.runtime import compat


def shadow(
    model: nn.Module, dtype: torch.dtype | None
) -> tuple[nn.Module, dict[int, torch.Tensor]]:
    """`model` in eval mode without memory, its weights in `dtype` (None: as they are); and, by
    the id of the copy, what of the model each tensor that is no parameter stands for.

    What is part of the state dict and a floating-point number takes the dtype; other tensors, such
    as the frequencies of a rotary embedding, keep theirs, whether they are registered as buffers or
    not. The copy shares no tensor with `model`.
    """
    model = unwrapped(model)
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        empty = _hollow(parameter.shape, _cast(parameter, dtype))
        memo[id(parameter)] = nn.Parameter(empty, requires_grad=False)
    held: dict[int, torch.Tensor] = {}
    for module in model.modules():
        buffers = dict(module.named_buffers(recurse=False))
        stored = buffers.keys() - module._non_persistent_buffers_set
        plain = {name: value for name, value in vars(module).items() if torch.is_tensor(value)}
        for name, tensor in {**plain, **buffers}.items():
            if id(tensor) not in memo:
                kind = _cast(tensor, dtype if name in stored else None)
                empty = _hollow(tensor.shape, kind)
                memo[id(tensor)] = empty
                held[id(empty)] = tensor
    made = copy.deepcopy(model, memo).eval()
    for module in made.modules():  # parts of an encoder-decoder have configurations of their own
        compat.turn_off_cache(module)
    compat.prepare_recording(made)
    compat.run_experts_by(made, all_experts)
    return made, held


def _hollow(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor with the memory of one number, which is none where the type has that."""
    number = float("nan") if dtype.is_floating_point else 0
    return torch.full((), number, dtype=dtype).expand(shape)


def _cast(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return tensor.dtype if dtype is None or not tensor.is_floating_point() else dtype
