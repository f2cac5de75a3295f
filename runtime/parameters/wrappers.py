"""Functions of torch and of libraries that are given models with stored parameters.

They would flatten, shard, swap or save DTensors of which they know nothing: refused by name, before
any rank waits, or done in our way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

from autoshard.runtime import compat
from autoshard.runtime.errors import AutoshardError, ConfigError, message
from autoshard.runtime.parameters.eager import StoredTensor
from autoshard.runtime.parameters.saving import (
    save_adapters_together,
    save_together,
    upload_once,
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
    # grad, vjp and jacrev; vmap; jvp and jacfwd
    compat.replace("torch._functorch.eager_transforms", "_wrap_all_tensors", _refuse_operands)
    compat.replace("torch._functorch.vmap", "_create_batched_inputs", _refuse_mapped)
    compat.replace("torch.autograd.forward_ad", "make_dual", _refuse_dual)
    # what strict and other exports call first: Dynamo would stop at the first parameter
    compat.replace("torch.export._trace", "_process_export_inputs", _refuse_export)
    compat.replace("transformers.modeling_utils", "PreTrainedModel.save_pretrained", save_together)
    hub = "transformers.utils.hub"
    compat.replace(hub, "PushToHubMixin._upload_modified_files", upload_once)
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


def refuse_ddp(models: Iterable[nn.Module] = ()) -> None:
    """Raise where one of `models` is a DistributedDataParallel, or one calls what is compiled:
    Dynamo leaves its forward to eager code, and its reducer misses gradients of stored tensors."""
    wrappers = [one for one in models if isinstance(one, DistributedDataParallel)]
    for one in filter(None, [*wrappers, compat.running_ddp()]):
        if one.process_group.size() > 1:
            name, model = type(one).__name__, getattr(one.module, "_orig_mod", one.module)
            raise ConfigError(
                message(
                    f"a {type(model).__name__} is compiled in {name}",
                    remedy=f"{_without(name)} A script that wraps its model because RANK is set "
                    "(`if ddp: model = DDP(model)`) needs that line off and the rest of its branch "
                    "on: each data-parallel rank has its own batch.",
                )
            )


def _check(wrapper: str, module: nn.Module) -> None:
    """Raise where a wrapper for data parallelism is given stored parameters."""
    _refuse_stored(wrapper, module, _without(wrapper))


def _without(wrapper: str) -> str:
    return (
        f"Leave {wrapper} out: data parallelism is an axis of the mesh, "
        "options={'mesh': {'dp_shard': N}} or {'dp_replicate': N}, which reduces the gradients."
    )


def _refuse_stored(what: str, module: nn.Module, remedy: str) -> None:
    """Raise where a parameter of the module is stored; `what` cannot be done with it."""
    for name, parameter in module.named_parameters():
        if isinstance(parameter, StoredTensor):
            raise AutoshardError(
                message(
                    f"{what} of a {type(module).__name__} whose parameters are stored on the "
                    f"mesh {_sizes(parameter)} ({name} as {parameter.placements})",
                    remedy=remedy,
                )
            )


def _refuse_operands(original: Callable[..., Any], operands: Any, *args: Any) -> Any:
    """Raise where a transform of torch.func would wrap a stored tensor: torch's operators then see
    a DTensor beside plain tensors, and the gradient would be one of this rank's batch."""
    if not torch.compiler.is_dynamo_compiling():
        _check_operands("differentiates or wraps", pytree.tree_leaves(operands))
    return original(operands, *args)


def _refuse_mapped(
    original: Callable[..., Any], dims: Any, values: Any, *args: Any, **kwargs: Any
) -> Any:
    """As `_refuse_operands`, of what vmap maps."""
    if not torch.compiler.is_dynamo_compiling():
        _check_operands("maps", [v for d, v in zip(dims, values) if d is not None])
    return original(dims, values, *args, **kwargs)


def _refuse_dual(
    original: Callable[..., Any], tensor: Any, tangent: Any, *args: Any, **kwargs: Any
) -> Any:
    """As `_refuse_operands`, of forward mode: the tangent would be lost with the gathered value."""
    if not torch.compiler.is_dynamo_compiling() and compat.transforming():
        _check_operands("differentiates", [tensor, tangent])
    return original(tensor, tangent, *args, **kwargs)


def _check_operands(does: str, values: Iterable[Any]) -> None:
    for value in values:
        if isinstance(value, StoredTensor):
            raise AutoshardError(
                message(
                    f"a transform of torch.func {does} a stored tensor of shape "
                    f"{tuple(value.shape)}, stored on the mesh {_sizes(value)}",
                    remedy="Hand it whole tensors: {name: p.full_tensor() for name, p in "
                    "model.named_parameters()}, on every rank; along data-parallel axes average "
                    "the gradients yourself. Or call backward, or torch.autograd.grad, which do.",
                )
            )


def _refuse_export(
    original: Callable[..., Any], model: nn.Module, *args: Any, **kwargs: Any
) -> Any:
    """torch.export has no form for a parameter of which the rank holds a part."""
    _refuse_stored(
        "torch.export",
        model,
        "Make the model anew, load autoshard.full_state_dict(model, rank0_only=False) into it, and "
        "export that.",
    )
    return original(model, *args, **kwargs)


def _sizes(stored: StoredTensor) -> dict[str, int]:
    mesh = stored.device_mesh
    return dict(zip(mesh.mesh_dim_names or (), mesh.shape))


def _set(original: Callable[..., Any], dest: Any, src: Any) -> None:
    """What a parametrization writes to its original: torch would swap the tensors, which it refuses
    for one that Dynamo holds a weak reference to."""
    if isinstance(dest, StoredTensor):
        dest.data = src
    else:
        original(dest, src)
