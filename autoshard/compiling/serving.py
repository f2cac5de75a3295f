"""`inner="tensorrt"`: the conditions under which torch-tensorrt is given a program."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping

import torch
import torch.distributed as dist

from autoshard.errors import ConfigError, message


def check_serving(sizes: Mapping[str, int], device: str) -> None:
    """Raise ConfigError unless torch-tensorrt can run the programs of a mesh.

    sizes: of the mesh's axes. device: type of the model's device. Its converters of collectives
    take all processes torchrun started as their group, whatever group a collective names, so the
    mesh must be one axis tp of all of them. Its engines have no backward.
    """
    if importlib.util.find_spec("torch_tensorrt") is None:
        raise _refusal(
            "torch_tensorrt is not installed", "pip install 'autoshard[torch-tensorrt]'."
        )
    if device != "cuda":
        raise _refusal(
            f"the model is on {device}, and TensorRT runs on an NVIDIA GPU",
            "Move it to the GPU, or take inner='inductor'.",
        )
    world = dist.get_world_size() if dist.is_initialized() else 1
    if sizes.get("tp", 1) != world:
        shown = ", ".join(f"{name}={size}" for name, size in sizes.items())
        raise _refusal(
            f"the mesh is {shown} of {world} processes, and the collectives of torch-tensorrt "
            "are always among all of them",
            f"Give the mesh {{'tp': {world}}}, or export engines: autoshard.export.tensorrt.",
        )
    if torch.is_grad_enabled():
        raise _refusal(
            "it was called with gradients enabled, and TensorRT has no backward",
            "Call the model under torch.no_grad().",
        )


def _refusal(what: str, remedy: str) -> ConfigError:
    return ConfigError(message(f"options['inner'] is 'tensorrt': {what}", remedy=remedy))
