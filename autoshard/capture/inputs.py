"""The devices of a Dynamo graph's inputs: of its model and of its example."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autoshard.runtime.compat import GraphInput


def device_type(inputs: Sequence[GraphInput]) -> str:
    """The device the model lives on; a model on "meta" is planned for the default device."""
    devices = {i.real.device.type for i in inputs if isinstance(i.real, torch.Tensor)} - {"meta"}
    return "cuda" if "cuda" in devices else "cpu"


def example_device(model: nn.Module, example: Any) -> str:
    """The device a model will live on: its own, or that of the example where it is on meta."""
    tensors = [*model.parameters(), *pytree.tree_leaves(example)]
    kinds = {t.device.type for t in tensors if isinstance(t, torch.Tensor)}
    return "cuda" if "cuda" in kinds else "cpu"
