"""Models that were given to torch.compile, as far as no graph of theirs has decided anything."""

import functools
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autoshard.config import Config, axis_sizes
from autoshard.parameters.storage import store_unplanned
from autoshard.planning import Plan
from autoshard.runtime.agreement import attempt, wait_at_most
from autoshard.runtime.collectives import DATA_AXES, data_axes
from autoshard.runtime.mesh import init_mesh
from autoshard.runtime.parameters import (
    expect_stored,
    note_attributes,
    refuse_ddp,
    unstorable,
)


def store_what_is_left(models: list[nn.Module], options: dict[str, Any]) -> None:
    """Store models whose frames Dynamo left to eager code, on a mesh whose ranks have batches of
    their own: nothing else would reduce their gradients, and the ranks would train apart."""
    refuse_ddp(models)
    parameter = next((p for model in models for p in model.parameters()), None)
    config = Config.from_options(options)
    if parameter is None or config.mesh is None:
        return
    mesh = init_mesh(config.mesh, parameter.device.type)
    if data_axes(mesh.axes):
        with attempt():
            wait_at_most(config.timeout)
            store_unplanned(models, mesh, config)


def expect_reduced(model: nn.Module, options: dict[str, Any], disabled: bool) -> None:
    """Have steps on the parameters of a model be errors while no call has stored them, where its
    ranks have batches of their own. disabled: whether torch.compile returned it as it is."""
    refuse_ddp([model])
    note_attributes(model)
    expect_stored(model, functools.partial(_why, options, disabled))


def _why(options: dict[str, Any], disabled: bool, parameter: torch.Tensor) -> str:
    config = Config.from_options(options)
    sizes = axis_sizes(config.mesh)
    if config.mesh is None and config.plan is not None:
        plan = config.plan if isinstance(config.plan, Plan) else Plan.load(Path(config.plan))
        sizes = plan.mesh or {}
    if sizes and not any(sizes.get(axis, 1) > 1 for axis in DATA_AXES):
        return ""  # the ranks have one batch, and compute the same
    mesh = " x ".join(f"{axis}={size}" for axis, size in sizes.items()) or "a mesh to be chosen"
    reason = "no compiled call has stored them on it"
    if disabled:
        reason = "torch.compile is disabled (TORCHDYNAMO_DISABLE=1, or disable=True)"
    elif isinstance(parameter, nn.Parameter) and (kind := unstorable(parameter)):
        reason = f"the first cannot be stored on it: {kind}"
    return f"the model was given to torch.compile for {mesh}, and {reason}"
