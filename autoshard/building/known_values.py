"""Facts about the values of a batch that decide what a mask of attention means.

An `attention_mask` of ones hides nothing, and positions that count up are of one document. Eager
models look at the values; a graph cannot. So a program is built for a batch of which they are true,
another for any batch, and each call is checked before it picks one (`autoshard.backend`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from autoshard.config import Config
from autoshard.passes import ONES, POSITIONS
from autoshard.runtime import compat
from autoshard.runtime.agreement import from_first
from autoshard.runtime.collectives import Axis


def batch_facts(inputs: Sequence[compat.GraphInput]) -> dict[int, str]:
    """ONES or POSITIONS by index of the placeholder, for this call's integers and booleans of at
    most two dims. What has no values (the meta device, a trace inside another) has no facts."""
    found = {}
    for index, item in enumerate(inputs):
        real = item.real
        if real is None or isinstance(real, nn.Parameter) or item.of_model:
            continue
        whole = type(real) is torch.Tensor and real.layout == torch.strided
        integral = not (real.dtype.is_floating_point or real.dtype.is_complex)
        if not whole or real.is_meta or not integral or not 1 <= real.dim() <= 2:
            continue
        for fact in (ONES, POSITIONS):
            if holds({index: fact}, {index: real}):
                found[index] = fact
                break
    return found


def agreed_facts(
    inputs: Sequence[compat.GraphInput], axes: Sequence[Axis], config: Config
) -> dict[int, str]:
    """`batch_facts` of the batch that the ranks of all these axes will compute with."""
    facts = batch_facts(inputs) if config.recover_masks else {}
    for axis in axes if config.batches == "broadcast" else ():
        sent = from_first([[i, fact] for i, fact in facts.items()], "facts of the batch", axis)
        facts = {i: fact for i, fact in sent}
    return facts


def holds(facts: Mapping[int, str], values: Sequence[Any] | Mapping[int, Any]) -> bool:
    """Whether the facts are true of a call's arguments. On an accelerator the host waits for the
    answer, as it does in eager models."""
    if not facts:
        return True  # most programs: leaving the caller's modes would be felt at every step
    with compat.real_tensors(), torch.no_grad():
        for index, fact in facts.items():
            value = values[index]
            if fact == ONES:
                expected: Any = 1
            elif value.dtype == torch.bool:
                return False
            else:
                expected = torch.arange(value.shape[-1], device=value.device)
            if value.numel() == 0 or not bool((value == expected).all()):
                return False
    return True
