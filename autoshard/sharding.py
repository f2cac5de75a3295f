"""`autoshard.shard`: plan a model and store its parameters as shards, without a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from autoshard.building import agreed_facts, build_agreed, unplanned_parameters
from autoshard.capture import example_device, intercept
from autoshard.compiling import use_by
from autoshard.config import Config
from autoshard.mesh_search import choose
from autoshard.parameters import initialise_buffers, store
from autoshard.runtime import compat
from autoshard.runtime.agreement import attempt, wait_at_most
from autoshard.runtime.collectives import State
from autoshard.runtime.mesh import Mesh, init_mesh, start_world
from autoshard.runtime.parameters import cast_parameters, note_attributes


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
    note_attributes(model)
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
    ) -> tuple[dict[nn.Parameter, tuple[State, str]], Mesh]:
        choice = choose(gm, example_inputs, inputs, config, device, batch)
        mesh = init_mesh(choice.mesh, device)
        facts = agreed_facts(inputs, mesh.sharing, config)
        program = build_agreed(gm, example_inputs, inputs, mesh, config, device, facts)
        return unplanned_parameters(inputs, program), mesh

    planned, mesh = intercept(model, args, kwargs, plan)
    if planned:
        store(planned, mesh, config)
    initialise_buffers(model, device)
