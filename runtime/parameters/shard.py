"""Parameters become shards: every owner gets a new Parameter that holds a DTensor.

One parameter at a time, and the whole one is freed before the next: the peak is the unsharded
model and one parameter.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import SparseAdam
from torch.utils import _pytree as pytree

from autoshard.runtime import compat
from autoshard.runtime.agreement import agree, count_stored, everyone
from autoshard.runtime.collectives import I, State, all_reduce, data_axes
from autoshard.runtime.errors import AutoshardError
from autoshard.runtime.mesh import Mesh
from autoshard.runtime.parameters.access import install
from autoshard.runtime.parameters.eager import as_parameter, as_stored, unsharded
from autoshard.runtime.parameters.layout import (
    dense_stride,
    from_first_rank,
    local_part,
    owned,
    placements_of,
    stored_states,
    wrap_local,
)
from autoshard.runtime.parameters.optimizers import repoint, state_summary
from autoshard.runtime.parameters.owners import Holders, Owners, find_owners, is_keyed, order_of
from autoshard.runtime.parameters.record import policy_of
from autoshard.runtime.parameters.unsharding import unshard_parameter
from autoshard.runtime.parameters.wrappers import replace_functions


def states_of(parameters: Mapping[str, nn.Parameter]) -> dict[str, tuple[str, torch.Tensor]]:
    """The optimizers' tensors that have a parameter's shape, by a name of their own that ranks
    share: (the parameter's name, the tensor)."""
    found: dict[str, tuple[str, torch.Tensor]] = {}
    for number, optimizer in enumerate(find_owners(tuple(parameters.values())).optimizers):
        for name, parameter in parameters.items():
            for key, value in (
                optimizer.state[parameter] if parameter in optimizer.state else {}
            ).items():
                if isinstance(value, torch.Tensor):
                    if value.shape == parameter.shape and key != "step":
                        found[f"{key} of {name} in optimizer {number}"] = name, value
                elif any(isinstance(leaf, DTensor) for leaf in pytree.tree_leaves(value)):
                    raise AutoshardError(
                        f"the state {key!r} that {type(optimizer).__name__} has of {name} is a "
                        f"{type(value).__name__} of stored tensors, which no other mesh takes",
                        remedy="Save it with the job, or begin with new states.",
                    )
    return found


def replace_stored(
    moved: Mapping[nn.Parameter, nn.Parameter], states: Mapping[int, torch.Tensor]
) -> None:
    """Give every holder of stored parameters those that replace them, on another mesh.

    states: the optimizers' tensors in place of those of before, by the id of these; such as have
    no parameter's shape are whole on every rank, and are so again.
    """
    owners = find_owners(tuple(moved))
    for old, new in moved.items():
        assert isinstance(new, DTensor)
        mesh = new.device_mesh

        def whole(x: torch.Tensor, mesh: DeviceMesh = mesh) -> torch.Tensor:
            if not isinstance(x, DTensor):
                return x
            return as_stored(wrap_local(compat.local_of(x), x.shape, {}, mesh, x.stride()))

        for key, value in old.__dict__.items():
            new.__dict__.setdefault(key, value)
        compat.move_hooks(old, new)
        for optimizer in owners.optimizers:
            repoint(optimizer, old, new, old.shape, lambda x: states[id(x)], whole)
        for module, key in owners.modules[old]:
            module._parameters[key] = new
    install(moved, owners)
    _repoint_containers(moved, owners)


class MovedParameter(nn.Parameter):
    """The class of a whole parameter that its shard has replaced: empty, and an error to use.

    References that could not be found (a local variable, a tuple) would otherwise read a stale
    value, or see no gradient, silently.
    """

    _autoshard_moved = "a parameter"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        owner = next((a for a in (*args, *(kwargs or {}).values()) if type(a) is cls), cls)
        raise AutoshardError(
            f"{owner._autoshard_moved} is stored as shards now, and this is the Parameter "
            "object from before the first call",
            remedy="Take the parameter again from model.parameters().",
        )

    def __repr__(self, *args: Any, **kwargs: Any) -> str:  # type: ignore[override]
        return f"MovedParameter({self._autoshard_moved})"


def unstorable(parameter: nn.Parameter) -> str | None:
    """Why a parameter cannot be stored as a DTensor, or None where it can."""
    if isinstance(parameter, DTensor):
        return None
    if type(parameter) is not nn.Parameter:
        return f"it is a {type(parameter).__name__}, not a plain nn.Parameter"
    if parameter.layout is not torch.strided:
        return f"its layout is {parameter.layout}"
    if not parameter.is_leaf:
        return "it is not a leaf of autograd"
    return None


def shard_parameters(
    placements: Mapping[nn.Parameter, Mapping[str, State]],
    mesh: Mesh,
    *,
    broadcast: bool,
    allocate_meta: bool = True,
    alive: Holders | None = None,
    order: Sequence[str] = (),
) -> dict[nn.Parameter, nn.Parameter]:
    """Store each parameter in the given state on each axis (I where an axis is not named).

    Every module, optimizer, list and dict value that holds one gets the new Parameter. Names,
    requires_grad, `.grad`, attributes, hooks and optimizer state move with it; gradient and state
    are cut alike. `module.weight` then is the whole weight, on demand (see `access`). A parameter
    that is stored already is stored anew.

    broadcast: rank 0's values (and optimizer state) go to every rank; else each rank's own are
    trusted to be equal. A parameter on the meta device gets an uninitialised shard on the mesh's
    device, filled with NaN so that forgetting to load it shows; load it with load_state_dict or
    torch.distributed.checkpoint. allocate_meta: False keeps such shards on the meta device.
    order: the names of all parameters of the models, in their order, which has to be every rank's.

    Returns the new parameter for each old one; the old ones are empty, and errors to use.
    Collective over the mesh, in the order of `placements`. Does nothing in a world of one process.
    Raises AutoshardError, before anything is changed, for a parameter no module owns and for one
    that cannot be stored; PlanMismatchError where ranks differ in what they are to store.
    """
    if mesh.device_mesh is None or mesh.size == 1:
        return {}
    with compat.real_tensors():
        owners = find_owners(tuple(placements), alive)
        names = {p: _name(p, owners) for p in placements}
        _check(placements, owners, names, mesh)
        _agree(placements, owners, names, mesh, order)
        moved: dict[nn.Parameter, nn.Parameter] = {}
        for old, states in placements.items():
            if isinstance(old, DTensor) and _same(states, stored_states(old)):
                continue
            moved[old] = _move(old, states, owners, names[old], mesh, broadcast, allocate_meta)
            count_stored(moved[old], mesh.axes)
        install(moved, owners)
        replace_functions()
        _repoint_containers(moved, owners)
    return moved


def _check(
    placements: Mapping[nn.Parameter, Mapping[str, State]],
    owners: Owners,
    names: Mapping[nn.Parameter, str],
    mesh: Mesh,
) -> None:
    for parameter, states in placements.items():
        reason = unstorable(parameter)
        if not owners.modules[parameter]:
            reason = "no module owns it, so nothing can be given its shard"
        if reason:
            raise AutoshardError(
                f"{names[parameter]} of shape {tuple(parameter.shape)} cannot be sharded: {reason}",
                remedy="Register it in a module as an nn.Parameter, or leave it replicated.",
            )
        placements_of(states, mesh.axes, parameter.dim())
        for optimizer in owners.optimizers:
            groups = optimizer.param_groups if isinstance(optimizer, SparseAdam) else []
            if any(p is parameter for group in groups for p in group["params"]):
                raise AutoshardError(
                    f"{names[parameter]} of shape {tuple(parameter.shape)} is trained by "
                    "SparseAdam, which takes sparse gradients only, and the gradient of a "
                    "stored parameter is dense",
                    remedy="Use Adam for it, or SGD or Adagrad, whose steps are the same for "
                    "sparse and dense gradients.",
                )


def _agree(
    placements: Mapping[nn.Parameter, Mapping[str, State]],
    owners: Owners,
    names: Mapping[nn.Parameter, str],
    mesh: Mesh,
    order: Sequence[str],
) -> None:
    """Raise where ranks hold different gradients or state: they would wait for ever. And where
    parameters are in another order, by which rank 0's values and an optimizer's states go to them:
    modules that were made by walking through a Python set. Names may begin otherwise on a rank."""
    lines = [
        f"{names[p]} {p.dtype} {tuple(p.shape)} meta {p.is_meta}, stored {dict(states)}, "
        f"gradient {p.grad is not None}, "
        f"state {[state_summary(optimizer, p) for optimizer in owners.optimizers]}"
        for p, states in placements.items()
    ]
    digest = hashlib.sha256("\n".join([*lines, order_of(order)]).encode()).hexdigest()
    for axis in everyone(mesh.axes):
        agree("parameters to shard", digest, [*lines, *order], axis)


def _move(
    old: nn.Parameter,
    states: Mapping[str, State],
    owners: Owners,
    name: str,
    mesh: Mesh,
    broadcast: bool,
    allocate_meta: bool,
) -> nn.Parameter:
    def store(tensor: torch.Tensor, states: Mapping[str, State]) -> DTensor:
        return _store(tensor, states, mesh, broadcast, allocate_meta)

    shape = old.shape
    new = as_parameter(store(old, states), old.requires_grad)
    if old.grad is not None:
        new.grad = store(_reduced(old, mesh), states)
        old.grad = None
    for key, value in old.__dict__.items():
        new.__dict__.setdefault(key, value)
    compat.move_hooks(old, new)
    for optimizer in owners.optimizers:
        repoint(optimizer, old, new, shape, lambda t: store(t, states), lambda t: store(t, {}))
    for module, key in owners.modules[old]:
        module._parameters[key] = new
    if not isinstance(old, DTensor):
        if old.requires_grad and compat.is_in_a_graph(old):
            _pass_on_gradient(old, *owners.modules[old][0])
        else:
            # Dynamo, in whose backend call this runs, still holds the object: free what it holds.
            old.data = torch.empty(0, dtype=old.dtype, device=old.device)
        old.__dict__.clear()
        old._autoshard_moved = name  # type: ignore[attr-defined]
        old.__class__ = MovedParameter
    return new


def _reduced(parameter: nn.Parameter, mesh: Mesh) -> torch.Tensor:
    """The gradient that a parameter has when it is stored: of a backward through the model itself,
    which knew of no mesh, it is that of this rank's batch."""
    grad = parameter.grad
    assert grad is not None
    if isinstance(parameter, DTensor):
        return grad
    average = policy_of(parameter).average
    for axis in data_axes(mesh.axes):
        grad = all_reduce(grad.to(mesh.device_mesh.device_type), "sum", axis)  # type: ignore[union-attr]
        grad = grad / axis.size if average else grad
    return grad


def _pass_on_gradient(old: nn.Parameter, module: nn.Module, name: str) -> None:
    """Send the gradient that is still to come to the parameter that replaces `old`.

    Eager code has read `old` in this very step, before the first compiled region stored it: the
    embedding of a model whose layers are compiled one by one. Its values stay until the graph is
    gone, and its gradient goes the way of a weight that eager code reads.
    """

    def arrived(old: torch.Tensor) -> None:
        with compat.plain_attributes():
            grad, old.grad = old.grad, None
        with torch.enable_grad():
            whole = unsharded(module._parameters[name])  # type: ignore[arg-type]
        assert grad is not None
        torch.autograd.backward(whole, grad.to(whole.dtype))

    compat.drop_accumulated_hooks(old)  # those of the user are the new one's
    old.register_post_accumulate_grad_hook(arrived)


def _store(
    tensor: torch.Tensor,
    states: Mapping[str, State],
    mesh: Mesh,
    broadcast: bool,
    allocate_meta: bool,
) -> DTensor:
    device_mesh = mesh.device_mesh
    assert device_mesh is not None
    shape = tensor.shape
    stride = dense_stride(tensor)
    if isinstance(tensor, DTensor):
        whole = unshard_parameter(tensor).detach()
    else:
        whole = tensor.detach()
        if broadcast and not whole.is_meta:
            whole = from_first_rank(whole.to(device_mesh.device_type), device_mesh)
    part = local_part(whole, states, mesh.axes)
    if part.is_meta and allocate_meta:
        part = torch.empty(part.shape, dtype=part.dtype, device=device_mesh.device_type)
        part.fill_(float("nan")) if part.is_floating_point() else part.zero_()
    return as_stored(wrap_local(owned(part), shape, states, device_mesh, stride))


def _repoint_containers(moved: Mapping[nn.Parameter, nn.Parameter], owners: Owners) -> None:
    """Repoint lists such as `params = list(model.parameters())`, kept to clip gradients."""
    by_id = {id(old): new for old, new in moved.items()}
    for container in owners.containers:
        if isinstance(container, dict) and is_keyed(container, by_id.keys()):
            items_before = list(container.items())
            container.clear()
            container.update((by_id.get(id(key), key), value) for key, value in items_before)
            continue
        items = enumerate(container) if isinstance(container, list) else container.items()
        for key, value in list(items):
            if id(value) in by_id:
                container[key] = by_id[id(value)]


def _same(wanted: Mapping[str, State], has: Mapping[str, State]) -> bool:
    return all(wanted.get(name, I) == state for name, state in has.items())


def _name(parameter: nn.Parameter, owners: Owners) -> str:
    # the owners of a tied parameter come in the order of memory, which ranks do not share
    found = [f"{type(module).__name__}.{name}" for module, name in owners.modules[parameter]]
    return min(found, default="a parameter")
