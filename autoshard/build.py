"""From Dynamo's graph to a Program: capture, passes, plan, rewrite. Starts no process."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from autoshard.capture import GLOBAL_TYPES, IDENTITY_TARGETS, capture
from autoshard.compiling import Following, lowered_dtypes, settings, traced_microbatch, use_by
from autoshard.config import Config
from autoshard.errors import CaptureError, message
from autoshard.explain import check_strict, explain_plan
from autoshard.passes import (
    SILENT,
    Context,
    DataParallel,
    Localize,
    Report,
    Watch,
    WeighTokens,
    prepare,
    run_passes,
)
from autoshard.planning import (
    Decisions,
    Plan,
    Request,
    fingerprint,
    merged,
    plan_graph,
    strategy_text,
    value,
    whole_graph,
)
from autoshard.planning.cost import HARDWARE, Hardware
from autoshard.planning.estimate import STORED
from autoshard.program import Program
from autoshard.runtime import compat
from autoshard.runtime.collectives import (
    DATA_AXES,
    Axis,
    R,
    State,
    data_axes,
    data_states,
    shard_dim,
)
from autoshard.runtime.compat import artifact
from autoshard.runtime.errors import PlanError
from autoshard.runtime.lazy import LazyGather
from autoshard.runtime.mesh import Mesh
from autoshard.runtime.parameters import materialize, stored_states

# What capture reads through: a stored parameter and a lazy output are tensors of global shape.
IDENTITY_TARGETS.add(materialize)
if LazyGather not in GLOBAL_TYPES:
    GLOBAL_TYPES.append(LazyGather)


@dataclass
class Planned:
    """A captured graph with its decisions, before it is rewritten.

    plan: the decisions of this graph joined to those of the plan it was asked to follow.
    """

    serial: fx.GraphModule
    parameters: dict[fx.Node, str]
    data: dict[fx.Node, dict[str, State]]
    decisions: Decisions
    plan: Plan


def build_program(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    inputs: list[compat.GraphInput],
    mesh: Mesh,
    config: Config,
    machine: Hardware,
    microbatch: str | None = None,
) -> Program:
    """Plan one Dynamo graph on the axis tp for `machine`; rewrite it for one rank of the mesh.

    microbatch: what its backward does with gradients (`unshard.MICROBATCH`); None: what the graph
    was traced for.

    Raises CaptureError where the graph cannot be captured and PlanError where a loaded plan or
    the memory budget cannot be met.
    """
    axis = mesh.axis("tp")
    if microbatch is None:
        microbatch = traced_microbatch(gm)
    dtypes = lowered_dtypes(inputs)
    watch = Following(settings(), mesh.axes)
    captured = capture(gm, example_inputs, dtypes)
    planned = plan_captured(captured, inputs, mesh, config, machine, watch)
    serial, decisions, parameters = planned.serial, planned.decisions, planned.parameters
    if axis.size > 1:
        guard_divisible(serial, decisions.strategies, decisions.state, axis.size, inputs)
    watch.runs(Localize.name)
    watch.before(Localize.name, serial)
    local = Localize(serial, decisions, axis, config.recompute_collectives).run()
    watch.after(Localize.name, local)
    if data_axes(mesh.axes) or dtypes:
        refuse_mutated(serial, parameters)
        placeholders = [n for n in serial.graph.nodes if n.op == "placeholder"]
        states = {i: planned.data[n] for i, n in enumerate(placeholders) if n in planned.data}
        stored_dtypes = {i: inputs[i].real.dtype for i in dtypes}  # type: ignore[union-attr]
        for i, dtype in stored_dtypes.items():
            placeholders[i].meta[STORED] = dtype
        replicas = DataParallel(
            data_axes(mesh.axes),
            states,
            regather=config.zero == 3,
            use=use_by(config, mesh),
            dtypes=stored_dtypes,
            microbatch=microbatch,
        )
        context = Context(axis, config)
        run_passes((replicas,), local, context, watch)
        if config.loss_tokens == "global" and data_axes(mesh.axes):
            (weighed,) = run_passes((WeighTokens(data_axes(mesh.axes)),), local, context, watch)
            _warn_of_no_mean(weighed, serial)
    program = Program(
        local,
        serial,
        planned.plan,
        decisions,
        axis,
        parameters,
        mesh,
        planned.data,
        config,
        microbatch,
        watch=watch,
    )
    artifact(f"autoshard_{watch.number:02}-plan", planned.plan.text)
    artifact(f"autoshard_{watch.number:02}-explain", lambda: explain_plan(program))
    if config.strict and axis.size > 1:
        check_strict(program)
    return program


def plan_captured(
    captured: fx.GraphModule,
    inputs: list[compat.GraphInput],
    mesh: Mesh,
    config: Config,
    machine: Hardware,
    watch: Watch = SILENT,
) -> Planned:
    """Plan a captured graph on the axis tp of `mesh`; the passes before the plan change it."""
    axis = mesh.axis("tp")
    serial, _ = prepare(captured, axis, config, watch)
    placeholders = [n for n in serial.graph.nodes if n.op == "placeholder"]
    parameters: dict[fx.Node, str] = {}
    stored: dict[fx.Node, State] = {}
    data: dict[fx.Node, dict[str, State]] = {}
    for node, item in zip(placeholders, inputs, strict=True):
        if isinstance(item.real, nn.Parameter):
            parameters[node] = parameter_name(item.source)
            data[node] = data_states(item.real.dim(), mesh.axes)
            if isinstance(item.real, DTensor) and is_planned(item.real):
                found = stored_states(item.real)
                stored[node] = found.get(axis.name, R)
                data[node] = {name: found[name] for name in DATA_AXES if name in found}
        elif isinstance(item.real, torch.Tensor) and item.source.startswith("L['self']"):
            node.meta["buffer"] = True
    plan = load_plan(config.plan, axis)
    request = Request(
        parameters,
        stored,
        sequence_parallel=config.sequence_parallel,
        lazy_outputs=config.outputs != "replicate",
        memory_budget=config.memory_budget,
        plan=plan,
    )
    if axis.size == 1:
        decisions = whole_graph(serial, machine, request)
    else:
        decisions = plan_graph(serial, axis.size, machine, request)
    full = merged(plan, decisions, request, serial, axis.size)
    return Planned(serial, parameters, data, decisions, full)


def _warn_of_no_mean(weighed: Report, serial: fx.GraphModule) -> None:
    if not weighed.hits and any(map(_trains, serial.graph.output_node().all_input_nodes)):
        warnings.warn(
            'loss_tokens="global" found no mean loss in the graph: compute it in the '
            "compiled model, or weigh its tokens there (docs/losses.md)",
            stacklevel=2,
        )


def _trains(output: fx.Node) -> bool:
    return bool(output.meta.get("diff"))


def refuse_mutated(serial: fx.GraphModule, parameters: Mapping[fx.Node, str]) -> None:
    """A parameter written in forward would be written whole into its data-parallel shard."""
    placeholders = [n for n in serial.graph.nodes if n.op == "placeholder"]
    for i in serial.meta.get("mutated", ()):
        if placeholders[i] in parameters:
            raise CaptureError(
                message(
                    f"the model writes to its parameter {parameters[placeholders[i]]} in forward, "
                    "and data parallelism stores parameters as shards, precision in another dtype",
                    remedy="Write to it outside the compiled call, or make it a buffer.",
                )
            )


def load_plan(plan: Any, axis: Axis) -> Plan | None:
    """The plan an option gives, by object or by path, checked against the axis."""
    if plan is None:
        return None
    loaded = plan if isinstance(plan, Plan) else Plan.load(Path(plan))
    if (loaded.axis, loaded.size) != (axis.name, axis.size):
        raise PlanError(
            f"the plan is for {loaded.axis}={loaded.size}, this mesh has {axis.name}={axis.size}: "
            "make a plan for this mesh, or change options['mesh']"
        )
    return loaded


# Which device of its kind a rank uses, and where an object lies, are its own affair.
_OF_THIS_PROCESS = re.compile(r":\d+(?=['\"])|(?: object)? at 0x[0-9a-f]+|, index=\d+")


def plan_lines(program: Program) -> list[str]:
    """What ranks compare: options, where each parameter lives, and each node with its constants,
    shape, dtype and strategy."""
    lines = [f"gradients: {program.microbatch}", *program.config.lines()]
    lines += [f"parameter {name}: {state}" for name, state in program.plan.parameters.items()]
    strategies = program.decisions.strategies
    for node in program.serial.graph.nodes:
        val = value(node)
        shape = f" {tuple(val.shape)} {val.dtype}" if isinstance(val, torch.Tensor) else ""
        text = f": {strategy_text(strategies[node])}" if node in strategies else ""
        args = _OF_THIS_PROCESS.sub("", f"{node.args}") if node.op == "call_function" else ""
        lines.append(f"{node.op} {program.parameters.get(node, node.name)}{args}{shape}{text}")
    copies = program.plan.graphs[fingerprint(program.serial)].copies
    return lines + [f"copy of {name}: {state}" for name, state in copies.items()]


def unplanned_parameters(
    inputs: list[compat.GraphInput], program: Program
) -> dict[nn.Parameter, State]:
    """Parameters of the graph that no graph has planned before, with their planned state."""
    placeholders = [n for n in program.serial.graph.nodes if n.op == "placeholder"]
    return {
        item.real: program.decisions.stored[node]
        for node, item in zip(placeholders, inputs, strict=True)
        if isinstance(item.real, nn.Parameter) and not is_planned(item.real)
    }


def is_planned(parameter: nn.Parameter) -> bool:
    """Whether a graph has decided where the parameter lives; later graphs obey."""
    return isinstance(parameter, DTensor) and parameter.__dict__.get("_autoshard_planned", True)


def set_planned(parameter: nn.Parameter, planned: bool) -> None:
    """Say that the stored state is a decision, or only a place to wait for one."""
    if isinstance(parameter, DTensor):
        parameter.__dict__["_autoshard_planned"] = planned


# By code object: sizes (source, dim) of inputs that decide a size which some graph shards.
_split_sizes: dict[int | None, set[tuple[str, int]]] = {}


def guard_divisible(
    serial: fx.GraphModule,
    strategies: dict[fx.Node, Any],
    state: Any,
    n: int,
    inputs: list[compat.GraphInput],
) -> None:
    """Make Dynamo guard that the axis divides every symbolic size the plan shards.

    Evaluating `size % n == 0` on the traced symbol records the guard; a length that n does not
    divide then compiles its own variant instead of getting a wrong answer. That variant guards
    that n does not divide: it would else serve every length from then on, unsharded.
    """
    sizes = {
        (item.source, dim): extent
        for item in inputs
        if isinstance(item.fake, torch.Tensor)
        for dim, extent in enumerate(item.fake.shape)
        if not isinstance(extent, int)
    }
    known = _split_sizes.setdefault(compat.frame_id(), set())
    for key, size in sizes.items():
        if key in known:
            bool(size % n == 0)
    for node in serial.graph.nodes:
        val = value(node)
        if node not in strategies or not isinstance(val, torch.Tensor):
            continue
        dim = shard_dim(state(node))
        extent: Any = 0 if dim is None else val.shape[dim]
        if not isinstance(extent, int):
            if not bool(extent % n == 0):
                raise AssertionError(f"{node.name}: planned S({dim}) of {extent} on {n}")
            known.update(k for k, size in sizes.items() if _symbols(size) & _symbols(extent))


def _symbols(size: Any) -> Any:
    """The symbols a symbolic size is made of."""
    return size.node.expr.free_symbols


def parameter_name(source: str) -> str:
    """`L['self']._modules['a']._parameters['weight']` or `L['self'].a.weight` -> `a.weight`."""
    name = re.sub(r"\._(?:modules|parameters|buffers)\['([^']+)'\]", r".\1", source)
    name = re.sub(r"\[['\"]?([^'\"\]]+)['\"]?\]", r".\1", name)
    return re.sub(r"^L\.(self|fn)\.", "", name)


def device_type(inputs: list[compat.GraphInput]) -> str:
    """The device the model lives on; a model on "meta" is planned for the default device."""
    devices = {i.real.device.type for i in inputs if isinstance(i.real, torch.Tensor)} - {"meta"}
    return "cuda" if "cuda" in devices else "cpu"


def example_device(model: nn.Module, example: Any) -> str:
    """The device a model will live on: its own, or that of the example where it is on meta."""
    tensors = [*model.parameters(), *pytree.tree_leaves(example)]
    kinds = {t.device.type for t in tensors if isinstance(t, torch.Tensor)}
    return "cuda" if "cuda" in kinds else "cpu"


def hardware_of(device: str) -> Hardware:
    """The built-in description nearest to the machine."""
    return HARDWARE["h100" if device == "cuda" else "cpu"]
