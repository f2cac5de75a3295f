"""The step of one parameter on the host: torch's own, of a copy of this rank's part.

An optimizer's state has the parameter's placement wherever it lies, so state dicts are those of an
optimizer on the device.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from autoshard.runtime import compat
from autoshard.runtime.mesh import axes_of
from autoshard.runtime.offloading.staging import Staged
from autoshard.runtime.parameters import like, local_part, owned, stored_states

MASTER = "master"
"""The entry of a parameter's state that holds its copy in a wider dtype."""

_FUSED = (Adam, AdamW, SGD, Adagrad)


def part_of(parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """This rank's part of a value of the parameter's shape: stored alike, or whole; of a value of
    another shape itself."""
    if isinstance(parameter, DTensor) and value.shape == parameter.shape:
        placed = parameter.device_mesh, parameter.placements
        if isinstance(value, DTensor) and (value.device_mesh, value.placements) != placed:
            value = value.full_tensor()
        if not isinstance(value, DTensor):
            axes = axes_of(parameter.device_mesh)
            return owned(local_part(value.detach(), stored_states(parameter), axes))
    return compat.local_of(value) if isinstance(value, DTensor) else value


def on_host(
    parameter: torch.Tensor, state: dict[str, Any], dtype: torch.dtype | None
) -> dict[str, Any]:
    """A parameter's state with its tensors on the host, placed like the parameter.

    dtype: what the tensors of the parameter's shape are kept in; None: as they are.
    """
    found: dict[str, Any] = {}
    for name, value in state.items():
        if name == "step" or not isinstance(value, torch.Tensor):
            found[name] = value.cpu() if isinstance(value, torch.Tensor) else value
            continue
        part, whole = part_of(parameter, value), value.shape == parameter.shape
        kept = dtype if whole and value.is_floating_point() else None
        part = part.to("cpu", kept or part.dtype)
        found[name] = like(parameter, part) if isinstance(parameter, DTensor) and whole else part
    return found


def step_on_host(
    optimizer: Optimizer,
    cls: type[Optimizer],
    group: dict[str, Any],
    parameter: torch.Tensor,
    host: Staged,
    master: torch.dtype | None,
) -> None:
    """Step one parameter of a group as `cls` does; the new values are in `host` then.

    host: the parameter's part and its gradient's. master: the dtype of the copy that is stepped in
    the parameter's place. Elements of the parameter that are not the rounded copy's were written
    since the last step, and are taken.
    """
    held = optimizer.state[parameter]
    state = {n: compat.local_of(v) if isinstance(v, DTensor) else v for n, v in held.items()}
    kept = state.pop(MASTER, None)
    if master is None:
        stepped, gradient = host.parameter, host.gradient
    else:
        stepped = _merged(kept, host.parameter, master)
        gradient = host.gradient.to(master)
    stepped.grad = gradient
    proxy = cls.__new__(cls)
    proxy.__dict__.update(optimizer.__dict__)
    proxy.param_groups = [{**group, **_settings(cls, group, parameter), "params": [stepped]}]
    proxy.state = defaultdict(dict, {stepped: state})
    _unhooked_step(cls)(proxy)
    stepped.grad = None
    if master is not None:
        host.parameter.copy_(stepped)
        state[MASTER] = stepped
    shape = host.parameter.shape
    for name, value in state.items():
        if isinstance(parameter, DTensor) and isinstance(value, torch.Tensor):
            whole = value.shape == shape and name != "step"
            state[name] = like(parameter, value) if whole else value
    optimizer.state[parameter] = state


def _merged(kept: torch.Tensor | None, written: torch.Tensor, master: torch.dtype) -> torch.Tensor:
    """The copy of a parameter, with the elements of it that were written since it was rounded."""
    if kept is None:
        return written.to(master)
    rounded = kept.to(written.dtype)
    if torch.equal(rounded, written):
        return kept
    return torch.where(rounded == written, kept, written.to(master))


def _settings(
    cls: type[Optimizer], group: dict[str, Any], parameter: torch.Tensor
) -> dict[str, Any]:
    """What a group's settings are on the host. Beside a GPU the fused step runs, unless another
    was asked for: it passes over memory once."""
    found: dict[str, Any] = {"lr": group["lr"]} if "lr" in group else {}
    if isinstance(found.get("lr"), torch.Tensor):
        found["lr"] = found["lr"].cpu()
    if "capturable" in group:
        found["capturable"] = False
    if cls in _FUSED and not parameter.is_cpu and parameter.is_floating_point():
        found["fused"] = True if group["fused"] is group["foreach"] is None else group["fused"]
    return found


def _unhooked_step(cls: type[Optimizer]) -> Any:
    """The step of a class without the hooks, which ran for the whole optimizer."""
    step = cls.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[attr-defined]
