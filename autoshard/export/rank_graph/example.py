"""The call of a model that is traced: an example of zeros on the CPU, its dynamic dims marked."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autoshard.export.rank_graph.encoder import TOKENS
from autoshard.export.spec import DIMS, EngineSpec
from autoshard.runtime import compat


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
    sizes = _primes(_planned_sizes(spec), spec.tp)
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
    prompts would send weights between ranks at each of them, where activations are smaller."""
    sizes = {name: extent.optimum for name, extent in spec.extents.items()}
    if spec.max_length is not None and "sequence" in sizes:
        sizes["sequence"] = spec.extents["sequence"].minimum
    return sizes


def _primes(sizes: Mapping[str, int], tp: int) -> dict[str, int]:
    """For each dynamic size a prime that no other has: sharding asks whether a size is divisible,
    and torch takes equal sizes for the same one."""
    taken = {tp}
    chosen: dict[str, int] = {}
    for name, wanted in sizes.items():
        size = max(wanted, 2 * tp + 1, 3)
        while size in taken or any(size % i == 0 for i in range(2, math.isqrt(size) + 1)):
            size += 1
        taken.add(size)
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
