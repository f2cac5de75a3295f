"""From Dynamo's graph to a Program: capture, passes, plan, rewrite. Starts no process."""

import functools
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import fx, nn
from torch.distributed.tensor import DTensor

from autoshard.building.fitting import chunk_as_first, fit, remembered_by
from autoshard.building.local_passes import local_passes, serial_passes, warn_of_no_mean
from autoshard.building.planned import Planned, Unplanned, choices_made, layout_of, load_plan
from autoshard.capture import capture, guard_divisible
from autoshard.compiling import EQUAL_LAYERS, DebugWatch, doing, settings
from autoshard.config import Config, Precision
from autoshard.errors import ConfigError
from autoshard.explain import check_strict, explain
from autoshard.parameters import lowered_dtypes, say_stored, traced_microbatch
from autoshard.passes import SILENT, Float8Products, GlobalTokenMean, Watch, prepare, rank_program
from autoshard.planning import Request, is_trained, on_rank, shardable, value
from autoshard.planning.chunked_loss import chunking_of
from autoshard.planning.cost import Cluster, Machine, fusing_for
from autoshard.planning.estimate import Training
from autoshard.program import Program
from autoshard.runtime import compat
from autoshard.runtime.collectives import Axis, I, State, data_axes, data_states, gathering_axes
from autoshard.runtime.compat import artifact
from autoshard.runtime.graph_meta import BUFFER, DIFF
from autoshard.runtime.lazy_gather import LazyGather
from autoshard.runtime.mesh import Mesh, offline_mesh
from autoshard.runtime.parameters import is_planned, stored_states


def build_program(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    inputs: list[compat.GraphInput],
    mesh: Mesh,
    config: Config,
    cluster: Cluster,
    microbatch: str | None = None,
    even: bool = False,
    facts: Mapping[int, str] = MappingProxyType({}),
    room: int | None = None,
    before: Program | None = None,
) -> Program:
    """Plan one Dynamo graph on the axis tp of a mesh on `cluster`; rewrite it for one rank.

    microbatch: what its backward does with gradients (`unshard.MICROBATCH`); None: what the graph
    was traced for. even: whether only dims are split that the axis divides. before: the program
    of this graph from before its parameters were stored, whose captured graph is planned again.

    Raises CaptureError where the graph cannot be captured and PlanError where a loaded plan or
    the memory budget cannot be met.
    """
    axis = mesh.planned
    config.refuse(mesh.sizes)
    if mesh.axis("pp").size > 1:
        raise ConfigError(
            f"the mesh has pp={mesh.axis('pp').size}: trace, verify, explain and export have "
            "no program of a stage yet",
            remedy="Compile the model on the processes of the mesh, or leave pp out of it.",
        )
    if microbatch is None:
        microbatch = traced_microbatch(gm)
    dtypes = lowered_dtypes(inputs)
    watch = DebugWatch(settings(), mesh.axes)
    # with gradients off around the call, a graph of stored parameters is captured as another one;
    # and who watches the passes is shown all of them
    again = torch.is_grad_enabled() and not (settings().level or settings().folder)
    prepared = before.serial if again and before is not None and before.outer is None else None
    if prepared is None:
        with doing("capture"):
            parameters = [one.real for one in inputs if isinstance(one.real, nn.Parameter)]
            stored = all(map(is_planned, parameters))  # by an earlier graph
            every = EQUAL_LAYERS in settings().left_out
            captured = capture(gm, example_inputs, dtypes, inference=stored, whole=every)
    else:
        captured = prepared
    say_stored(captured, inputs, config)
    machine = cluster.on(mesh.sizes)
    given = captured, inputs, mesh, config, machine, watch, even, facts, room
    asked = ask(*given, prepared=prepared is not None)
    with doing("plan"):
        planned = asked.plan()

    def built(planned: Planned, mesh: Mesh, watch: Watch = SILENT) -> Program:
        serial = planned.serial
        passes = local_passes(planned, inputs, mesh, config, dtypes, microbatch)
        local, reports = rank_program(serial, passes, mesh.planned, watch)
        if mesh.outer is not None:
            on_rank(local, mesh.outer)
        if any(one.name == GlobalTokenMean.name and not one.hits for one in reports):
            warn_of_no_mean(serial)
        return Program(
            graph_module=local,
            serial=serial,
            plan=planned.plan,
            decisions=planned.decisions,
            axis=mesh.planned,
            parameters=planned.parameters,
            mesh=mesh,
            data=planned.data,
            config=config,
            microbatch=microbatch,
            outer=planned.outer,
            watch=watch,
        )

    budget = config.memory_budget or room
    owned = [item.real for item in inputs if isinstance(item.real, nn.Parameter)]
    remembered = remembered_by(owned, mesh.axes, [microbatch, *config.lines()])
    if budget is not None and is_trained(planned.serial):
        if config.host_memory and any(_on_gpu(node) for node in planned.serial.graph.nodes):
            compat.transfers()  # or raises
        made = functools.partial(built, mesh=offline_mesh(mesh.sizes, 0))
        assumed = config.memory_budget is None
        planned = fit(asked, planned, made, budget, assumed, remembered)
    elif config.chunk_loss == "auto" and data_axes(mesh.axes):
        planned = chunk_as_first(planned, remembered)
    decisions, serial = planned.decisions, planned.serial
    if axis.size > 1:
        guard_divisible(serial, decisions.strategies, decisions.state, axis.size, inputs)
    if planned.outer is not None:
        whole, chosen, n = planned.outer.serial, planned.outer.decisions, planned.outer.axis.size
        guard_divisible(whole, chosen.strategies, chosen.state, n, inputs)
    program = built(planned, mesh, watch)
    artifact(f"autoshard_{watch.number:02}-plan", planned.plan.text)
    artifact(f"autoshard_{watch.number:02}-explain", lambda: explain(program, compiled=False))
    if config.strict and axis.size > 1:
        check_strict(program)
    return program


def ask(
    captured: fx.GraphModule,
    inputs: list[compat.GraphInput],
    mesh: Mesh,
    config: Config,
    machine: Machine,
    watch: Watch = SILENT,
    even: bool = False,
    facts: Mapping[int, str] = MappingProxyType({}),
    room: int | None = None,
    training: Training | None = None,
    prepared: bool = False,
) -> Unplanned:
    """What is asked of the plan of a captured graph on the axis tp of `mesh`; the passes before
    the plan change it, where it is not `prepared` by them.

    training: of the steps that the graph is run in; None: AdamW's, each of one batch.
    """
    axis = mesh.planned
    placeholders = captured.graph.find_nodes(op="placeholder")
    passes = serial_passes(
        facts if config.recover_masks else None,
        exchanges=mesh.axis("ep").size > 1,
        sequences=mesh.axis("cp").size > 1,
        tracked=config.rng == "tracker",
        float8=_float8(placeholders, inputs, config),
        ranges=not even and config.inner != "tensorrt",
    )
    if not prepared:
        prepare(captured, axis, passes, watch)
    placeholders = captured.graph.find_nodes(op="placeholder")
    parameters: dict[fx.Node, str] = {}
    stored: dict[fx.Node, State] = {}
    data: dict[fx.Node, dict[str, State]] = {}
    arriving: dict[fx.Node, State] = {}
    for node, item in zip(placeholders, inputs, strict=True):
        if isinstance(item.real, nn.Parameter):
            parameters[node] = item.name
            data[node] = data_states(item.real.dim(), mesh.axes)
            if isinstance(item.real, DTensor) and is_planned(item.real):
                found = stored_states(item.real)
                stored[node] = found.get(axis.name, I)
                data[node] = {one.name: found[one.name] for one in gathering_axes(mesh.axes)}
        elif isinstance(item.real, LazyGather):
            arriving[node] = _arrival(node, item.real, axis)
        elif isinstance(item.real, torch.Tensor) and item.of_model:
            node.meta[BUFFER] = True
    plan = load_plan(config.plan, axis, mesh.outer)
    budgeted = bool(config.memory_budget or room)
    chunking, chunking_to_fit = chunking_of(config.chunk_loss, budgeted)
    layout = layout_of(config, mesh, plan, is_trained(captured))
    request = Request(
        axis=axis.name,
        parameters=parameters,
        stored=stored,
        arriving=arriving,
        sequence_parallel=config.sequence_parallel,
        lazy_outputs=config.outputs != "replicate",
        contiguous_outputs=config.outputs == "dtensor",
        outputs_read=config.outputs != "sharded",
        memory_budget=config.memory_budget or room,
        budget_is_known=config.memory_budget is not None,
        host_memory=config.host_memory,
        training=training or Training(states=config.optimizer_states),
        plan=plan,
        layout=layout,
        chosen=choices_made(placeholders, inputs, layout) if layout.chooses else {},
        even=even,
        ep_exchange=config.ep_exchange,
        chunking=chunking,
        chunking_to_fit=chunking_to_fit,
        fusing=fusing_for(
            config.fuse_collectives, any(map(_on_gpu, placeholders)), axis.size, machine
        ),
    )
    return Unplanned(captured, request, data, mesh, config, machine)


def _float8(
    placeholders: Sequence[fx.Node],
    inputs: Sequence[compat.GraphInput],
    config: Config,
) -> Float8Products | None:
    """The pass that the option `precision` asks for."""
    recipe = Precision.of(config.precision).matmul
    if recipe is None:
        return None
    given = zip(placeholders, inputs, strict=True)
    names = [node.name for node, item in given if isinstance(item.real, nn.Parameter)]
    return Float8Products(recipe, frozenset(names))


def _on_gpu(node: fx.Node) -> bool:
    val = node.meta.get("val")
    return isinstance(val, torch.Tensor) and val.device.type == "cuda"


def _arrival(node: fx.Node, given: LazyGather, axis: Axis) -> State:
    """The state in which a graph takes an output of an earlier one: its shard where it can."""
    state = given.state_on(axis)
    differentiable = bool(node.meta.get(DIFF))
    return state if state in shardable(value(node), axis.size) and not differentiable else I
