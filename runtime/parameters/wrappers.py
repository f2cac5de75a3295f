"""Functions of torch and of libraries that are given models with stored parameters.

They would flatten, shard, swap or save DTensors of which they know nothing: refused by name, before
any rank waits, or done in our way. State dicts are made whole to be saved: every rank gathers, the
first one keeps and writes; `save_pretrained` of transformers and of PEFT, called on every rank,
goes this way by itself.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from autoshard.runtime import compat
from autoshard.runtime.agreement import announced, from_first
from autoshard.runtime.collectives import Axis
from autoshard.runtime.errors import AutoshardError, ConfigError
from autoshard.runtime.mesh import axes_of
from autoshard.runtime.parameters.eager import StoredTensor, gathered_axes, unsharded
from autoshard.runtime.parameters.unsharding import unshard_parameter

_REMEDY = (
    "Call it on every rank, not under `if rank == 0`: the ranks gather together, and the first one "
    "writes."
)


def full_state_dict(
    source: nn.Module | Optimizer | Mapping[str, Any], *, rank0_only: bool = True
) -> dict[str, Any]:
    """The state dict with whole tensors on the CPU in place of stored ones, to be saved: copies,
    which the next step leaves as they are.

    source: a model, an optimizer, or a state dict of one, also inside of other containers. Every
    rank calls it; the mesh's first rank gets the state, the others an empty dict, or all the state
    with rank0_only=False. Tied parameters stay one tensor.

        state = autoshard.full_state_dict(model)
        if rank == 0:
            torch.save(state, "model.pt")
    """
    state = source.state_dict() if isinstance(source, nn.Module | Optimizer) else source
    leaves, tree = pytree.tree_flatten(dict(state))
    axes = _axes(leaves)
    keeps = not rank0_only or _is_first(axes)
    wholes: dict[Any, torch.Tensor] = {}

    def whole(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        if x.layout is not torch.strided:
            return x.detach().clone()
        own = compat.local_of(x) if isinstance(x, DTensor) else x
        # by the storage, not the object: state_dict() makes two objects of a tied parameter
        at = compat.storage_key(own), own.storage_offset(), own.stride()
        key = at, x.shape, x.dtype, tuple(x.placements) if isinstance(x, DTensor) else None
        if key not in wholes:
            with torch.no_grad():
                made = unsharded(x).detach() if isinstance(x, DTensor) else x.detach()
            wholes[key] = _copied(made, own) if keeps else made.new_empty(0)
        return wholes[key]

    split = {axis for leaf in leaves if isinstance(leaf, DTensor) for axis in gathered_axes(leaf)}
    met = [axis for axis in axes if axis in split]
    with announced("gathering of a state dict", met, _REMEDY):
        leaves = [whole(leaf) for leaf in leaves]
    return pytree.tree_unflatten(leaves, tree) if keeps else {}


def _copied(whole: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """The whole on the CPU, in memory other than that of the tensor it was made of."""
    copied = whole.cpu()
    return copied.clone() if compat.same_storage(copied, own) else copied


def _axes(leaves: list[Any]) -> tuple[Axis, ...]:
    mesh = next((leaf.device_mesh for leaf in leaves if isinstance(leaf, DTensor)), None)
    return () if mesh is None else axes_of(mesh)


def _is_first(axes: tuple[Axis, ...]) -> bool:
    return all(axis.rank == 0 for axis in axes)


def save_together(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """transformers' `save_pretrained` of a model with stored parameters, called on every rank.

    The first rank runs it, with the whole state.
    """
    axes = _axes([p for p in model.parameters() if isinstance(p, StoredTensor)])
    given = inspect.signature(original).bind(model, *args, **kwargs)
    state = given.arguments.get("state_dict")
    if not axes or (state is not None and not _axes(pytree.tree_leaves(state))):
        return original(model, *args, **kwargs)  # nothing to gather
    with _together(model, axes) as attempted:
        given.arguments["state_dict"] = full_state_dict(model if state is None else state)
        if _is_first(axes):
            with attempted:
                original(*given.args, **given.kwargs)


def save_adapters_together(
    original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any
) -> Any:
    """PEFT's `save_pretrained`, which each rank runs, and of which the first one writes."""
    axes = _axes([p for p in model.parameters() if isinstance(p, StoredTensor)])
    if not axes:
        return original(model, *args, **kwargs)
    given = inspect.signature(original).bind(model, *args, **kwargs)
    main = given.arguments.get("is_main_process", True)
    given.arguments["is_main_process"] = main and _is_first(axes)
    with _together(model, axes) as attempted, attempted:
        original(*given.args, **given.kwargs)


def whole_adapters(original: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
    """What PEFT saves, whole: its choice of the state dict, made on each rank."""
    return full_state_dict(original(*args, **kwargs), rank0_only=False)


def upload_once(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """The upload of `push_to_hub`, called on every rank: of what the first one wrote."""
    stored = model.parameters() if isinstance(model, nn.Module) else ()
    if not _is_first(_axes([p for p in stored if isinstance(p, StoredTensor)])):
        return None
    return original(model, *args, **kwargs)


class _Attempt(contextlib.AbstractContextManager[None]):
    """A write on the first rank, whose error the others raise too. error: it, once it is there."""

    error: Exception | None = None

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
        if isinstance(error, AutoshardError) or not isinstance(error, Exception):
            return False
        self.error = error
        return True


@contextlib.contextmanager
def _together(model: nn.Module, axes: tuple[Axis, ...]) -> Iterator[_Attempt]:
    """A `save_pretrained` that every rank begins and ends: the directory is then complete."""
    what = f"save_pretrained of {type(model).__name__}"
    attempt = _Attempt()
    with announced(what, axes, _REMEDY):
        yield attempt
    story = None if attempt.error is None else f"{type(attempt.error).__name__}: {attempt.error}"
    for axis in axes:
        story = from_first(story, f"end of {what}", axis)
    if attempt.error is not None:
        raise attempt.error
    if story is not None:
        raise AutoshardError(
            f"{what}: the first rank could not write: {story}",
            remedy="See the output of that rank.",
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
    compat.replace(
        "torch.nn.modules.adaptive", "AdaptiveLogSoftmaxWithLoss.forward", _with_every_cluster
    )
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
                f"a {type(model).__name__} is compiled in {name}",
                remedy=f"{_without(name)} A script that wraps its model because RANK is set "
                "(`if ddp: model = DDP(model)`) needs that line off and the rest of its branch "
                "on: each data-parallel rank has its own batch.",
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
                f"{what} of a {type(module).__name__} whose parameters are stored on the "
                f"mesh {_sizes(parameter)} ({name} as {parameter.placements})",
                remedy=remedy,
            )


def _refuse_operands(original: Callable[..., Any], operands: Any, *args: Any) -> Any:
    """Raise where a transform of torch.func would wrap a stored tensor: torch's operators then see
    a DTensor beside plain tensors, and the gradient would be one of this rank's batch. In a graph
    it wraps the whole."""
    if torch.compiler.is_dynamo_compiling():
        operands = pytree.tree_map_only(StoredTensor, unshard_parameter, operands)
    else:
        _check_operands("differentiates or wraps", pytree.tree_leaves(operands))
    return original(operands, *args)


def _refuse_mapped(
    original: Callable[..., Any], dims: Any, values: Any, *args: Any, **kwargs: Any
) -> Any:
    """As `_refuse_operands`, of what vmap maps."""
    if torch.compiler.is_dynamo_compiling():
        values = pytree.tree_map_only(StoredTensor, unshard_parameter, values)
    else:
        _check_operands("maps", [v for d, v in zip(dims, values) if d is not None])
    return original(dims, values, *args, **kwargs)


def _refuse_dual(
    original: Callable[..., Any], tensor: Any, tangent: Any, *args: Any, **kwargs: Any
) -> Any:
    """As `_refuse_operands`, of forward mode: the tangent would be lost with the gathered value."""
    if not torch.compiler.is_dynamo_compiling() and compat.transforming():
        _check_operands("differentiates", [tensor, tangent])
    return original(tensor, tangent, *args, **kwargs)


def _with_every_cluster(
    original: Callable[..., Any], head: Any, rows: torch.Tensor, targets: torch.Tensor
) -> Any:
    """As with a target of each cluster behind the batch: torch passes over those without one, and
    a rank whose batch has none would not read weights that the others gather with it."""
    if targets.dim() != 1 or not isinstance(head.head._parameters["weight"], StoredTensor):
        return original(head, rows, targets)
    firsts = targets.new_tensor([0, *head.cutoffs[:-1]])
    rows = torch.cat([rows, rows.new_zeros(len(firsts), rows.shape[1])])
    found = original(head, rows, torch.cat([targets, firsts]))
    output = found.output[: len(targets)]
    return type(found)(output, -output.mean())


def _check_operands(does: str, values: Iterable[Any]) -> None:
    for value in values:
        if isinstance(value, StoredTensor):
            raise AutoshardError(
                f"a transform of torch.func {does} a stored tensor of shape "
                f"{tuple(value.shape)}, stored on the mesh {_sizes(value)}",
                remedy="Hand it whole tensors: {name: p.full_tensor() for name, p in "
                "model.named_parameters()}, on every rank; along data-parallel axes average "
                "the gradients yourself. Or call backward, or torch.autograd.grad, which do.",
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
