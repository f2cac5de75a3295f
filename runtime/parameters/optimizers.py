"""Optimizers that exist already when parameters become shards, and steps on what is not one."""

from __future__ import annotations

import functools
import hashlib
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autoshard.runtime import compat
from autoshard.runtime.agreement import agree, users_line
from autoshard.runtime.collectives import data_axes
from autoshard.runtime.errors import AutoshardError
from autoshard.runtime.mesh import axes_of, world_size
from autoshard.runtime.parameters.eager import StoredTensor
from autoshard.runtime.parameters.layout import is_whole
from autoshard.runtime.parameters.owners import models_of, names_of, order_of

Store = Callable[[torch.Tensor], torch.Tensor]


def repoint(
    optimizer: Optimizer,
    old: nn.Parameter,
    new: nn.Parameter,
    shape: torch.Size,
    shard: Store,
    replicate: Store,
) -> None:
    """Make `optimizer` hold `new` where it held `old`, in its groups and in its state.

    shape: the global shape. State of that shape (moments) goes through `shard`; other tensors
    (factored moments, say) through `replicate`, as the optimizer itself would create them from a
    DTensor; step counters and scalars stay as they are.
    """
    for group in optimizer.param_groups:
        held = group["params"]
        for index, parameter in enumerate(held):
            if parameter is old:
                held[index] = new
    if old in optimizer.state:
        # the same dict: a step that is under way (L-BFGS calls the model in its step) holds it
        state = optimizer.state.pop(old)
        for name, value in list(state.items()):
            state[name] = _move(name, value, shape, shard, replicate)
        optimizer.state[new] = state


def state_summary(optimizer: Optimizer, parameter: nn.Parameter) -> list[str]:
    """The optimizer's state of a parameter: names and shapes, for ranks to compare."""
    state: Mapping[str, Any] = optimizer.state[parameter] if parameter in optimizer.state else {}
    return [
        f"{name} {tuple(value.shape)}" if isinstance(value, torch.Tensor) else name
        for name, value in state.items()
    ]


def _move(name: str, value: Any, shape: torch.Size, shard: Store, replicate: Store) -> Any:
    if not isinstance(value, torch.Tensor) or name == "step":
        return value
    if value.shape == shape:
        return shard(value)
    return replicate(value) if value.dim() else value


Why = Callable[[torch.Tensor], str]
_given: weakref.WeakKeyDictionary[nn.Module, Why] = weakref.WeakKeyDictionary()


def expect_stored(model: nn.Module, why: Why) -> None:
    """Have the step of an optimizer on a parameter of `model` that is not stored be an error.

    why: asked at such a step, of the parameter: why it should be stored; "" where it need not be.
    """
    _watch_steps()
    _given[model] = why


@functools.cache
def _watch_steps() -> None:
    register_optimizer_step_pre_hook(_check_step)


@compat.not_traced
def _check_step(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
    """Raise AutoshardError where nothing reduced a gradient over the data-parallel ranks: of a
    parameter that is not stored, of a given model or beside stored ones in the optimizer."""
    if world_size() == 1:
        return None
    _refuse_unreduced(optimizer)
    _agree_on_order(optimizer)
    held = {**dict(enumerate(args)), **kwargs}
    closures = [key for key, value in held.items() if value is not optimizer and callable(value)]
    if not closures:
        return None
    for key in closures:  # what it computes is stepped on without another hook
        held[key] = functools.partial(_then_refuse, optimizer, held[key])
    return tuple(held[i] for i in range(len(args))), {key: held[key] for key in kwargs}


def _agree_on_order(optimizer: Optimizer) -> None:
    """Raise where ranks hold parameters in other orders (a Python set of them was walked through)
    and send each other what a step reads whole, in that order: equal shapes would be swapped."""
    if getattr(optimizer, "base", type(optimizer)) in _LOCAL:
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    ids = [*map(id, parameters)]
    stored: list[Any] = [p for p in parameters if isinstance(p, StoredTensor) and not is_whole(p)]
    if not stored or _agreed.get(optimizer) == ids:
        return
    names = names_of(models_of(stored))
    order = [names.get(p, "of no module") for p in parameters]
    digest = hashlib.sha256(order_of(order).encode()).hexdigest()
    for axis in axes_of(stored[0].device_mesh):
        agree("order of an optimizer's parameters", digest, order, axis, remedy=_IN_ORDER)
    _agreed[optimizer] = ids


_LOCAL = {getattr(torch.optim, name, None) for name in ("SGD", "Adam", "AdamW", "Adagrad")}
_LOCAL |= {getattr(torch.optim, name, None) for name in ("RMSprop", "NAdam", "RAdam", "Adamax")}
"""Optimizers of which every step is elementwise: no rank sends another anything."""

_agreed: weakref.WeakKeyDictionary[Optimizer, list[int]] = weakref.WeakKeyDictionary()

_IN_ORDER = (
    "Give the optimizer its parameters in one order on every rank: as model.parameters() has them, "
    "not as a Python set of them has."
)


def _then_refuse(optimizer: Optimizer, closure: Callable[[], Any]) -> Any:
    loss = closure()
    _refuse_unreduced(optimizer)
    return loss


def _refuse_unreduced(optimizer: Optimizer) -> None:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    plain = [p for p in parameters if not isinstance(p, DTensor) and p.grad is not None]
    if not plain:
        return
    why = _why_reduced(parameters, {id(p) for p in plain})
    if not why:
        return
    names = names_of(models_of(plain))
    found = [
        names.get(p, f"a {type(p).__name__} {tuple(p.shape)} of no module").replace(
            "_orig_mod.", ""
        )
        for p in plain
    ]
    more = f" and {len(found) - 5} more" if len(found) > 5 else ""
    raise AutoshardError(
        f"{type(optimizer).__name__}.step(): {len(plain)} of {len(parameters)} parameters have "
        f"gradients that nothing reduced over the data-parallel ranks: {', '.join(found[:5])}"
        f"{more}; {why}",
        where=users_line(),
        remedy="Compute them by what torch.compile returned, compiled(x) or compiled.method(x) "
        "(model.compile() compiles model(x) alone). What is trained beside a compiled model "
        "has to be in one module with it, or to have an optimizer of its own and gradients "
        "that you reduce.",
    )


def _why_reduced(parameters: Iterable[torch.Tensor], plain: set[int]) -> str:
    """Why plain parameters should have been reduced; "" where they need not be."""
    for model, why in list(_given.items()):
        found = next((p for p in model.parameters() if id(p) in plain), None)
        if found is not None and (reason := why(found)):
            return reason
    for p in parameters:
        if isinstance(p, StoredTensor) and (axes := data_axes(axes_of(p.device_mesh))):
            return f"others of this optimizer are stored along {', '.join(a.name for a in axes)}"
    return ""
