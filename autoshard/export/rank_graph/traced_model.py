"""What is traced of a model for an engine: a copy without memory, in another dtype than the
model's, and a call of zeros on the CPU, its dynamic dims marked.

Parameters and buffers become tensors of one repeated number on the CPU, whole where the model
stores shards: a tensor that forward makes without naming a device is on the CPU too. A Hugging Face
mixture of experts is told to run every expert on every token: tokens stay apart in it, which is
what a key-value cache asks of a graph, experts are one dim, which ranks can split, and no size
depends on the data. Which rows are computed in the end is chosen afterwards (chosen_rows.py).
"""

import inspect
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autoshard.export.rank_graph.encoder import TOKENS
from autoshard.export.serial_graph import unwrapped
from autoshard.export.spec import DIMS, EngineSpec
from autoshard.model_source import copied
from autoshard.runtime import compat


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
    made = copied(model, memo).eval()
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


def traced_call(model: nn.Module, spec: EngineSpec) -> dict[str, Any]:
    """The keyword arguments of the call of `model` to trace for `spec`."""
    args, kwargs = spec.example or ((), {})
    if not args and not kwargs:
        args = (torch.zeros(2, 8, dtype=torch.int64),)
    bound = inspect.signature(model.forward).bind(*args, **kwargs)
    call = dict(bound.arguments)
    for parameter in bound.signature.parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            call.update(call.pop(parameter.name, {}))
    sizes = _planned_sizes(spec)
    # the decoder of an encoder-decoder continues a sequence, the encoder's stays as it is
    lone = {name: size for name, size in sizes.items() if name != "sequence"}
    split = spec.max_length is not None and TOKENS in call
    return {
        name: pytree.tree_map_only(
            torch.Tensor,
            partial(
                _marked,
                sizes=lone if split and name != TOKENS else sizes,
                dtype=spec.weight_dtype,
            ),
            value,
        )
        for name, value in call.items()
    }


def _planned_sizes(spec: EngineSpec) -> dict[str, int]:
    """The sizes to plan for. With a cache nearly every call has the fewest tokens: a plan for
    prompts would send weights between ranks at each of them, where activations are smaller. Each
    is a prime that no other has: sharding asks whether a size is divisible, and torch takes equal
    sizes for the same one."""
    chosen: dict[str, int] = {}
    for name, extent in spec.extents.items():
        fewest = spec.max_length is not None and name == "sequence"
        size = max(extent.minimum if fewest else extent.optimum, 2 * spec.tp + 1, 3)
        while size in chosen.values() or any(size % i == 0 for i in range(2, math.isqrt(size) + 1)):
            size += 1
        chosen[name] = size
    return chosen


def _marked(
    tensor: torch.Tensor, sizes: Mapping[str, int], dtype: torch.dtype | None
) -> torch.Tensor:
    dims = DIMS[: tensor.dim()]
    shape = [sizes.get(name, size) for name, size in zip(dims, tensor.shape)]
    kind = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    made = torch.zeros([*shape, *tensor.shape[len(dims) :]], dtype=kind)
    for dim, name in enumerate(dims):
        if name in sizes:
            compat.mark_dynamic(made, dim)
    return made
