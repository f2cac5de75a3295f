"""Functions of torch and of libraries that are given models with stored parameters.

They would flatten, shard, swap or save DTensors of which they know nothing: refused by name, before
any rank waits, or done in our way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from autoshard.runtime import compat
from autoshard.runtime.errors import AutoshardError, message
from autoshard.runtime.parameters.eager import StoredTensor
from autoshard.runtime.parameters.saving import (
    save_adapters_together,
    save_together,
    whole_adapters,
)


def replace_functions() -> None:
    """Have torch, and the libraries that are imported, know stored parameters."""
    compat.replace("torch.nn.parallel.distributed", "DistributedDataParallel.__init__", _refuse)
    fsdp = "torch.distributed.fsdp"
    compat.replace(
        f"{fsdp}.fully_sharded_data_parallel", "FullyShardedDataParallel.__init__", _refuse
    )
    compat.replace(f"{fsdp}._fully_shard._fully_shard", "_validate_module", _refuse_fully_shard)
    compat.replace("torch.nn.utils.parametrize", "_maybe_set", _set)
    compat.replace("transformers.modeling_utils", "PreTrainedModel.save_pretrained", save_together)
    compat.replace("peft.peft_model", "PeftModel.save_pretrained", save_adapters_together)
    compat.replace("peft.peft_model", "get_peft_model_state_dict", whole_adapters)


def _refuse(
    original: Callable[..., Any], self: Any, module: nn.Module, *args: Any, **kwargs: Any
) -> Any:
    _check(type(self).__name__, module)
    return original(self, module, *args, **kwargs)


def _refuse_fully_shard(
    original: Callable[..., Any], module: Any, *args: Any, **kwargs: Any
) -> Any:
    for each in module if isinstance(module, list | tuple) else [module]:
        _check("fully_shard", each)
    return original(module, *args, **kwargs)


def _check(wrapper: str, module: nn.Module) -> None:
    """Raise where a wrapper for data parallelism is given stored parameters."""
    for name, parameter in module.named_parameters():
        if isinstance(parameter, StoredTensor):
            mesh = parameter.device_mesh
            sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape))
            raise AutoshardError(
                message(
                    f"{wrapper} of a {type(module).__name__} whose parameters are stored on the "
                    f"mesh {sizes} ({name} as {parameter.placements})",
                    remedy=f"Leave {wrapper} out: data parallelism is an axis of the mesh, "
                    "options={'mesh': {'dp_shard': N}} or {'dp_replicate': N}, which reduces the "
                    "gradients.",
                )
            )


def _set(original: Callable[..., Any], dest: Any, src: Any) -> None:
    """What a parametrization writes to its original: torch would swap the tensors, which it refuses
    for one that Dynamo holds a weak reference to."""
    if isinstance(dest, StoredTensor):
        dest.data = src
    else:
        original(dest, src)
