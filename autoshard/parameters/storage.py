"""Give parameters the storage a plan chose, and `autoshard.shard`, which does so without a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from autoshard.agreed_build import build_agreed, unplanned_parameters
from autoshard.capture import example_device, intercept
from autoshard.compiling import use_by
from autoshard.config import Config
from autoshard.mesh_search import choose
from autoshard.parameters.meta_buffers import initialise_buffers
from autoshard.parameters.repeated_layers import parameters_of_repeats
from autoshard.runtime import compat
from autoshard.runtime.agreement import attempt, from_first, wait_at_most
from autoshard.runtime.collectives import R, S, State, data_axes, data_states
from autoshard.runtime.mesh import Mesh, init_mesh, start_world
from autoshard.runtime.parameters import (
    cast_parameters,
    models_of,
    set_planned,
    set_policy,
    shard_parameters,
    unstorable,
)


def shard(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    **options: Any,
) -> nn.Module:
    """Plan `model` for `model(*args, **kwargs)` and store its parameters as shards, now.

    The first call of a compiled model does this by itself. Call it for a model on the meta device,
    which cannot be called: the shards (NaN until they are loaded) are the first memory its
    parameters take, and `autoshard.load_safetensors`, `load_state_dict` or
    torch.distributed.checkpoint fills them. Of the buffers on the meta device, those that no file
    holds are computed where the model knows how (Hugging Face's `_init_weights`); the others stay
    there: give them values before the first call.

    args, kwargs: an example batch on any device. options: the fields of `autoshard.Config`, the
    same that torch.compile gets. Collective over the mesh; returns `model`.
    """
    device = example_device(model, (args, kwargs))
    world = start_world(device)
    with attempt():
        config = Config.from_options(options)
        wait_at_most(config.timeout)
        given = None if config.mesh is None else init_mesh(config.mesh, device)
        if (world if given is None else given.size) > 1:
            _shard(model, args, kwargs, given, config, device)
    return model


def _shard(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    given: Mesh | None,
    config: Config,
    device: str,
) -> None:
    batch = pytree.tree_leaves((args, kwargs))
    if any(p.is_meta for p in model.parameters()):
        args, kwargs = pytree.tree_map_only(
            torch.Tensor, lambda t: t.to("meta"), (args, dict(kwargs or {}))
        )
    use = use_by(config, given)
    if use.param is not None:
        cast_parameters(list(model.parameters()), use)

    def plan(
        gm: fx.GraphModule, example_inputs: Sequence[Any], inputs: list[compat.GraphInput]
    ) -> tuple[dict[nn.Parameter, State], Mesh]:
        choice = choose(gm, example_inputs, inputs, config, device, batch)
        mesh = init_mesh(choice.mesh, device)
        program = build_agreed(gm, example_inputs, inputs, mesh, config, device)
        return unplanned_parameters(inputs, program), mesh

    planned, mesh = intercept(model, args, kwargs, plan)
    if planned:
        store(planned, mesh, config)
    initialise_buffers(model, device)


def store(
    planned: dict[nn.Parameter, State], mesh: Mesh, config: Config
) -> dict[nn.Parameter, nn.Parameter]:
    """Store the parameters a graph planned as planned, their like in other layers as well
    (`parameters_of_repeats`), and the rest of their models split.

    Optimizers and clip_grad_norm_ cannot mix DTensors with plain tensors, so parameters that the
    graph never read become DTensors too; the first graph that reads one decides where it lives.
    Until then eager code, such as what lies between two graphs, gathers it at each use. Returns
    the new parameter for each old one. Collective over the mesh.
    """
    axis = mesh.axis("tp")
    planned = _as_first(planned, mesh)
    models = models_of(list(planned))
    if axis.size > 1:
        alike = parameters_of_repeats(planned, models).items()
        planned = {**planned, **{p: state for p, state in alike if _is_whole(p)}}
    states = {
        parameter: {axis.name: state, **data_states(parameter.dim(), mesh.axes)}
        for parameter, state in planned.items()
    }
    rest = [
        p
        for model in models
        for p in model.parameters()
        if p not in states and _is_whole(p)
    ]
    for p in rest:
        resting = {axis.name: _resting_state(p, axis.size)} if axis.size > 1 else {}
        states[p] = {**resting, **data_states(p.dim(), mesh.axes)}
    set_policy(states, use_by(config, mesh))
    moved = shard_parameters(states, mesh, broadcast=config.initial_weights == "broadcast")
    for old, new in moved.items():
        set_planned(new, old in planned)
    for parameter in planned:
        set_planned(parameter, True)  # one that stays where it is stored
    return moved


def _as_first(planned: dict[nn.Parameter, State], mesh: Mesh) -> dict[nn.Parameter, State]:
    """The states that the first data-parallel rank planned.

    A plan depends on the shapes of the batch, which only the ranks of one tp group share; a
    parameter is stored alike on all ranks. The next trace obeys what is stored. Ranks whose graphs
    read other parameters keep their own plan, and `shard_parameters` refuses.
    """
    if mesh.axis("tp").size == 1:
        return planned
    said: list[Any] = [[list(parameter.shape), state] for parameter, state in planned.items()]
    for axis in reversed(data_axes(mesh.axes)):
        first = from_first(said, "storage of parameters", axis)
        if [shape for shape, _ in first] == [shape for shape, _ in said]:
            said = first
    return {parameter: state for parameter, (_, state) in zip(planned, said)}


def _is_whole(parameter: nn.Parameter) -> bool:
    """Whether it can be stored, and is not yet."""
    return not isinstance(parameter, DTensor) and unstorable(parameter) is None


def _resting_state(parameter: nn.Parameter, n: int) -> State:
    """Where a parameter waits for a graph that reads it: vectors whole, the rest by rows."""
    rows = parameter.shape[0] if parameter.dim() > 1 else 0
    return S(0) if rows >= n else R
