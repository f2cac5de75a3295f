"""Parameters get the storage that a plan chose.

Layers compiled one by one: the plan of the first gives the states of the others.

`for layer in model.layers: layer.compile(backend="autoshard")` makes one graph, which serves every
layer whose parameters are stored as those of the first are. So they are stored with it.

And models that were given to torch.compile, as far as no graph of theirs has decided anything.
"""

import functools
from collections.abc import Container, Iterable, Mapping, Sequence
from os.path import commonprefix
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from autoshard.config import Config, axis_sizes
from autoshard.errors import ConfigError
from autoshard.parameters.parameter_use import use_by
from autoshard.planning import Plan
from autoshard.runtime.agreement import attempt, everyone, from_first, wait_at_most
from autoshard.runtime.collectives import DATA_AXES, H, I, S, State, data_axes, data_states
from autoshard.runtime.mesh import Mesh, init_mesh
from autoshard.runtime.parameters import (
    Holders,
    expect_stored,
    models_of,
    names_of,
    note_attributes,
    refuse_ddp,
    set_choice,
    set_planned,
    set_policy,
    settle_buffers,
    shard_parameters,
    unstorable,
)

T = TypeVar("T")


def parameters_of_repeats(
    planned: Mapping[nn.Parameter, T], models: Sequence[nn.Module]
) -> dict[nn.Parameter, T]:
    """The parameters of a class's other modules that correspond to planned ones of the first.

    planned: what one graph read. The first is the smallest module of one of `models` that holds
    them; the others are of its class, and each such parameter has the shape and dtype of the
    planned one. The same on every rank.
    """
    found: dict[nn.Parameter, T] = {}
    for model in models:
        names = {
            name: parameter
            for name, parameter in model.named_parameters(remove_duplicate=False)
            if parameter in planned
        }
        path = ".".join(commonprefix([name.split(".")[:-1] for name in names]))
        if not path:
            continue
        first = model.get_submodule(path)
        for other in model.modules():
            if type(other) is not type(first) or other is first:
                continue
            own = dict(other.named_parameters(remove_duplicate=False))
            for name, parameter in names.items():
                its = own.get(name.removeprefix(f"{path}."))
                if its is not None and its not in planned and _alike(its, parameter):
                    found.setdefault(its, planned[parameter])
    return found


def _alike(a: nn.Parameter, b: nn.Parameter) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype


def store(
    planned: dict[nn.Parameter, tuple[State, str]], mesh: Mesh, config: Config
) -> dict[nn.Parameter, nn.Parameter]:
    """Store the parameters a graph planned as planned, their like in other layers as well
    (`parameters_of_repeats`), and the rest of their models split.

    planned: the state of each on the planned axis, and what dp_shard does with it, where that was
    chosen (`CHOICES`), or "".
    Optimizers and clip_grad_norm_ cannot mix DTensors with plain tensors, so parameters that the
    graph never read become DTensors too; the first graph that reads one decides where it lives.
    Until then eager code, such as what lies between two graphs, gathers it at each use. Returns
    the new parameter for each old one. Collective over the mesh.
    """
    axis = mesh.planned
    chooses = any(choice for _, choice in planned.values())
    if axis.size > 1 or chooses:
        planned = _as_first(planned, mesh)
    models, alive = _models_of(planned)
    if axis.size > 1 or chooses:
        alike = parameters_of_repeats(planned, models).items()
        planned = {**planned, **{p: state for p, state in alike if _is_whole(p)}}
    else:  # there is no other place; ranks that read others first store in the same order
        whole = [p for model in models for p in model.parameters() if _is_whole(p)]
        planned = {**dict.fromkeys(whole, (I, "")), **planned}
    states = {
        parameter: {axis.name: state, **data_states(parameter.dim(), mesh.axes, choice)}
        for parameter, (state, choice) in planned.items()
    }
    states.update(_resting(models, states.keys(), mesh))
    return _moved(states, planned, models, mesh, config, alive)


def store_at_home(
    planned: Mapping[nn.Parameter, tuple[Mapping[str, State], str]], mesh: Mesh, config: Config
) -> dict[nn.Parameter, nn.Parameter]:
    """Store parameters at the stages of pp that a pipeline planned, and the rest of their models on
    the first; scalars on all. At its home each is stored over the data-parallel axes.

    planned: the state of each on the other axes, and what dp_shard does with it, where that was
    chosen (`CHOICES`), or "". Returns the new parameter for each old one. Collective over the mesh.
    """
    planned = _as_first(planned, mesh)
    models, alive = _models_of(planned)
    left = [p for model in models for p in model.parameters() if p not in planned and _is_whole(p)]
    states: dict[nn.Parameter, dict[str, State]] = {
        p: {**state, **data_states(p.dim(), mesh.axes, choice)}
        for p, (state, choice) in planned.items()
    }
    states |= {p: {"pp": H(0) if p.dim() else I, **data_states(p.dim(), mesh.axes)} for p in left}
    return _moved(states, planned, models, mesh, config, alive)


def store_unplanned(models: Sequence[nn.Module], mesh: Mesh, config: Config) -> None:
    """Store every parameter of models that no graph was planned of, and of those that they are a
    part of: Dynamo left them to eager code.

    Their gradients are then reduced over the data-parallel axes, and a later graph decides anew.
    Collective over the mesh.
    """
    left = [p for model in models for p in model.parameters() if _is_whole(p)]
    if left:
        models, alive = _models_of(left)
        _moved(_resting(models, (), mesh), {}, models, mesh, config, alive)


def _models_of(parameters: Iterable[nn.Parameter]) -> tuple[list[nn.Module], Holders]:
    """The models that are to be stored, and what was looked at to find them. Raises where FSDP2
    shards modules of one."""
    alive = Holders()
    models = models_of(list(parameters), alive)
    for model in models:
        for name, module in model.named_modules():
            if isinstance(module, FSDPModule):
                raise ConfigError(
                    f"fully_shard was applied to {name or 'the model'}, a "
                    f"{type(module).__name__}, before its first compiled call: two would shard "
                    "its parameters",
                    remedy="Remove fully_shard, and give the axis to the mesh: "
                    "options={'mesh': {'dp_shard': N}}.",
                )
    return models, alive


def _moved(
    states: Mapping[nn.Parameter, Mapping[str, State]],
    planned: Mapping[nn.Parameter, tuple[Any, str]],
    models: Sequence[nn.Module],
    mesh: Mesh,
    config: Config,
    alive: Holders,
) -> dict[nn.Parameter, nn.Parameter]:
    set_policy(states, use_by(config, mesh))
    broadcast = config.initial_weights == "broadcast"
    order = tuple(names_of(models).values())
    moved = shard_parameters(states, mesh, broadcast=broadcast, alive=alive, order=order)
    settle_buffers(models, mesh, send=broadcast)
    for old, new in moved.items():
        set_planned(new, old in planned)
    for parameter, (_, choice) in planned.items():
        set_planned(parameter, True)  # one that stays where it is stored
        set_choice(moved.get(parameter, parameter), choice)
    return moved


def _resting(
    models: Iterable[nn.Module], but: Container[nn.Parameter], mesh: Mesh
) -> dict[nn.Parameter, dict[str, State]]:
    """Where the parameters of models, those aside that have a place, wait for a graph."""
    axis, states = mesh.planned, {}
    for p in [p for model in models for p in model.parameters() if p not in but and _is_whole(p)]:
        resting = {axis.name: _resting_state(p, axis.size)} if axis.size > 1 else {}
        states[p] = {**resting, **data_states(p.dim(), mesh.axes)}
    return states


def _as_first(planned: Mapping[nn.Parameter, T], mesh: Mesh) -> dict[nn.Parameter, T]:
    """The states that the first data-parallel rank planned.

    A plan depends on the shapes of the batch, which only the ranks of one tp or pp group share; a
    parameter is stored alike on all ranks. The next trace obeys what is stored. Ranks whose graphs
    read other parameters keep their own plan, and `shard_parameters` refuses.
    """
    said: list[Any] = [[list(parameter.shape), state] for parameter, state in planned.items()]
    for axis in reversed(everyone(mesh.axes) if data_axes(mesh.axes) else ()):
        first = from_first(said, "storage of parameters", axis, alike=True)
        if [shape for shape, _ in first] == [shape for shape, _ in said]:
            said = first
    return {parameter: state for parameter, (_, state) in zip(planned, said)}


def _is_whole(parameter: nn.Parameter) -> bool:
    """Whether a parameter can be stored, and is not yet."""
    return not isinstance(parameter, DTensor) and unstorable(parameter) is None


def _resting_state(parameter: nn.Parameter, n: int) -> State:
    """The stored state of a parameter until a graph reads it: vectors whole, the rest by rows."""
    rows = parameter.shape[0] if parameter.dim() > 1 else 0
    return S(0) if rows >= n else I


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
