"""`autoshard.shard`: plan a model and store its parameters as shards, without a step; and
`autoshard.reshard`: the same for one that trains already, with what it has learnt."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from autoshard.building import agreed_facts, build_agreed, unplanned_parameters
from autoshard.capture import example_device, intercept
from autoshard.config import Config
from autoshard.errors import AutoshardError
from autoshard.mesh_search import choose
from autoshard.model_source import copied
from autoshard.parameters import initialise_buffers, store, store_unplanned, use_by
from autoshard.runtime import compat
from autoshard.runtime.agreement import attempt, wait_at_most
from autoshard.runtime.collectives import State
from autoshard.runtime.mesh import Mesh, init_mesh, start_world
from autoshard.runtime.parameters import (
    cast_parameters,
    like,
    note_attributes,
    pending_of,
    replace_stored,
    states_of,
)
from autoshard.weights import BUFFER, Sender, Tensors, part_of, parts_of, transfer


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
        if (world if given is None else given.size) == 1:
            return model
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
    return model


def reshard(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    mesh: Any,
    buffer: int = BUFFER,
    **options: Any,
) -> nn.Module:
    """Move the parameters of a model, and the optimizers' states of them, to another mesh of the
    same processes; returns `model`, to be compiled with that mesh.

        autoshard.reshard(model, (ids,), mesh={"tp": 4})
        compiled = torch.compile(model, backend="autoshard", options={"mesh": {"tp": 4}})

    What goes through a checkpoint on disk otherwise goes from rank to rank by the plan of
    `autoshard.weights`. Every module, optimizer, list and dict that holds a parameter gets the new
    one, as at the first call. Until all has arrived the model stays as it is, and a rank holds its
    parts of both meshes.

    args, kwargs: an example batch, for which the model is planned; without one, parameters wait in
    rows over `tp` for the first call. buffer: bytes for slices on their way. options: as for
    `autoshard.shard`. Collective over the world. Raises AutoshardError while gradients wait.
    """
    inner: nn.Module = getattr(model, "_orig_mod", model)
    device = example_device(inner, (args, kwargs))
    if start_world(device) == 1:
        return model
    _refuse_gradients(inner)
    twin = _on_meta(inner)
    if args or kwargs:
        shard(twin, args, kwargs, mesh=mesh, **options)
    else:
        config = Config.from_options({"mesh": mesh, **options})
        with attempt():
            wait_at_most(config.timeout)
            store_unplanned([twin], init_mesh(mesh, device), config)
    before, names = parts_of(inner)
    after, _ = parts_of(twin)
    parameters = {n: p for n, p in inner.named_parameters() if n in before}
    before = {name: part for name, part in before.items() if name in parameters}
    after = {name: part for name, part in after.items() if name in parameters}
    new = dict(twin.named_parameters())
    states: dict[int, torch.Tensor] = {}
    for name, (of, value) in states_of(parameters).items():
        before[name] = part_of(value, name)
        local = torch.empty_like(after[of].tensor, dtype=value.dtype, device=value.device)
        states[id(value)] = like(new[of], local)  # type: ignore[arg-type]
        after[name] = part_of(states[id(value)], name)
    taker = Tensors(after, {name: name for name in after}, fresh=True)
    transfer(Sender(before), taker, buffer=buffer)
    replace_stored({parameters[name]: new[name] for name in parameters}, states)
    return model


def _refuse_gradients(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        pending = pending_of(parameter)
        if parameter.grad is not None or (pending is not None and pending.dirty):
            raise AutoshardError(
                f"{name} has a gradient, which would stay on the mesh of before",
                remedy="Step, and call zero_grad(set_to_none=True); after `no_sync` "
                "autoshard.discard_pending(model).",
            )


def _on_meta(model: nn.Module) -> nn.Module:
    """A copy of a model whose parameters and buffers are whole, on the meta device."""
    known: dict[int, Any] = {}
    for parameter in model.parameters():
        empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
        known[id(parameter)] = nn.Parameter(empty, parameter.requires_grad)
    for buffer in model.buffers():
        known[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copied(model, known)
