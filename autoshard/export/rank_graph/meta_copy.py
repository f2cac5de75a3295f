"""A copy of a model without memory: what an exporter traces in another dtype than the model's.

Parameters and buffers become tensors of one repeated number on the CPU, whole where the model
stores shards: a tensor that forward makes without naming a device is on the CPU too. A Hugging Face
mixture of experts is told to run every expert on every token, which is the only form of it without
sorting and without sizes that depend on the data.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

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


def all_experts(
    self: Any, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """A mixture of experts, every expert run on every token: [tokens, hidden] in and out.

    self: a Hugging Face module of experts. chosen, weights: [tokens, k], the experts of each token
    and how much each counts. Experts are the first dim of everything in between, so that they can
    be split over ranks with one all-reduce at the end.
    """
    first = self.gate_up_proj if self.has_gate else self.up_proj
    bias = "gate_up_proj_bias" if self.has_gate else "up_proj_bias"
    inner = _project(self, hidden.unsqueeze(0), first, bias)
    inner = compat.apply_gate(self, inner) if self.has_gate else self.act_fn(inner)
    out = _project(self, inner, self.down_proj, "down_proj_bias")
    if self.has_post_expert_norm:
        out = self.post_expert_norm(out)
    experts = torch.arange(first.shape[0], device=hidden.device)
    picked = chosen.unsqueeze(0) == experts.view(-1, 1, 1)  # [experts, tokens, k]
    share = torch.where(picked, weights.unsqueeze(0), 0).sum(-1, keepdim=True)
    # not a product alone: what an expert says of a token that is not its own may be infinite
    out = torch.where(picked.any(-1, keepdim=True), out, 0)
    return (out * share).sum(0).to(hidden.dtype)


def _project(self: Any, x: torch.Tensor, weight: torch.Tensor, bias: str) -> torch.Tensor:
    out = torch.matmul(x, weight if self.is_transposed else weight.transpose(-1, -2))
    return out + getattr(self, bias).unsqueeze(1) if self.has_bias else out
