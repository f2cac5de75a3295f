"""Every rank builds the same program, or every rank raises.

What ranks must agree on, as lines of text: one list for every axis, and for an export.

Ranks of an axis that share a batch compare all of it. Data-parallel ranks, whose batches differ,
may compile at different times, and different graphs where their batches have different shapes. So
they compare only when the parameters of a graph are about to be stored, which all do together, and
when parameters have been frozen or freed: the job and the parameters, and of the graph what does
not depend on a batch.
"""

import hashlib
import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakTensorKeyDictionary

from autoshard.building.batch_check import batch_shapes
from autoshard.building.one_rank import build_program
from autoshard.compiling import settings
from autoshard.config import Config
from autoshard.planning import fingerprint, target_name, value
from autoshard.planning.cost import cluster_of
from autoshard.program import Program
from autoshard.runtime import compat
from autoshard.runtime.agreement import SAME, agree, combined, compiles, gather, world_axis
from autoshard.runtime.collectives import State, data_axes
from autoshard.runtime.mesh import Mesh
from autoshard.runtime.parameters import is_planned, models_of

# Which device of its kind a rank uses, its place on an axis, and where an object lies, are its own
# affair.
_OF_THIS_PROCESS = re.compile(
    r":\d+(?=['\"])|(?: object)? at 0x[0-9a-f]+|, index=\d+|, rank=\d+, group='[^']*'"
)


@dataclass(frozen=True, kw_only=True)
class Compared:
    """Lines that must be the same on all ranks.

    job: of the environment, the machine, the options, and what was chosen within them.
    parameters: their names, shapes, dtypes and whether they are trained. nodes: of the serial
    graph. operators: their names alone. plan: where what is stored and split.
    """

    job: list[str]
    parameters: list[str]
    nodes: list[str]
    operators: list[str]
    plan: list[str]

    def lines(self) -> list[str]:
        """All of them; of what differs, the cause comes before what it leads to."""
        return [*self.job, *self.parameters, *self.nodes, *self.plan]


def compared(
    serial: fx.GraphModule,
    names: Mapping[fx.Node, str],
    tensors: Mapping[str, torch.Tensor],
    config: Config,
    machine: str,
    gradients: str,
    chosen: Sequence[str],
    plan: Sequence[str],
) -> Compared:
    """What ranks compare of a program.

    names: of the parameters of the serial graph. tensors: the parameters, by name. machine: for
    which the program is planned. gradients: what backward does with them (`unshard.MICROBATCH`).
    chosen: lines of what was chosen once for the job, as what a budget computes again.
    """
    wishes = settings().text()  # of the environment, which may differ between machines
    options = [f"gradients: {gradients}", *config.lines(), *chosen]
    return Compared(
        job=[wishes, f"hardware: {machine}", *options],
        parameters=lines_of(tensors),
        nodes=[_node_line(node, names) for node in serial.graph.nodes],
        operators=[f"{node.op} {target_name(node)}" for node in serial.graph.nodes],
        plan=list(plan),
    )


def lines_of(parameters: Mapping[str, torch.Tensor]) -> list[str]:
    """What ranks compare of parameters, by name."""
    return [
        f"parameter {name}: {tuple(one.shape)} {one.dtype}, requires_grad {one.requires_grad}"
        for name, one in parameters.items()
    ]


def digest_of(lines: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def default_floats(node: fx.Node) -> dict[str, float]:
    """The floats that a node leaves to its operator: `eps` of a norm."""
    schema = getattr(node.target, "_schema", None)
    absent = () if schema is None else schema.arguments[len(node.args) :]
    return {
        a.name: a.default_value
        for a in absent
        if type(a.default_value) is float and a.name not in node.kwargs
    }


def _node_line(node: fx.Node, parameters: Mapping[fx.Node, str]) -> str:
    """A node of a serial graph with its constants, shape and dtype."""
    val = value(node)
    shape = f" {tuple(val.shape)} {val.dtype}" if isinstance(val, torch.Tensor) else ""
    given = f"{node.args}" if node.op == "call_function" else ""
    kwargs = {**node.kwargs, **default_floats(node)}
    given += "".join(f" {name}={each}" for name, each in kwargs.items())
    args = _OF_THIS_PROCESS.sub("", given)
    return f"{node.op} {parameters.get(node, node.name)}{args}{shape}"


_trained: Any = WeakTensorKeyDictionary()
"""`requires_grad` of each parameter when a graph that reads it was last built."""


def agree_on_data_axes(
    mesh: Mesh,
    serial: fx.GraphModule,
    own: Compared,
    inputs: Sequence[compat.GraphInput],
    new: bool,
) -> None:
    """Raise PlanMismatchError on all ranks where those of a data-parallel axis differ.

    new: whether parameters of the graph are about to be stored. Constants are compared whole where
    the ranks' graphs have the same operators and inputs of the same shapes; where not, those that
    modules hold as attributes (`eps`), because others may be made of a batch's sizes, and the
    parameters of the whole model: a rank may have taken another branch.
    """
    parameters = [item.real for item in inputs if isinstance(item.real, nn.Parameter)]
    changed = [
        item.name
        for item in inputs
        if isinstance(item.real, nn.Parameter)
        and _trained.get(item.real, item.real.requires_grad) != item.real.requires_grad
    ]
    axes = data_axes(mesh.axes)
    if axes and (new or changed):
        shapes = batch_shapes(inputs)
        note = f"{shapes}; requires_grad of {changed[0]} was set" if changed else shapes
        whole = [*own.job, *own.parameters, *own.nodes]
        constants = [(n.args, n.kwargs, default_floats(n)) for n in serial.graph.nodes]
        floats = {each for each in pytree.tree_leaves(constants) if type(each) is float}
        graph = [shapes, digest_of(own.operators)], sorted(floats)
        for axis in axes:
            given = [*graph, digest_of(whole)]
            found = combined(given, "graph", axis, _together, alike=True, note=note)
            if found is SAME:
                continue
            same, floats = found
            models = models_of(parameters)
            lines = whole if same else [*own.job, *_lines_of_models(models, floats)]
            agree("plan", digest_of(lines), lines, axis, note=note)
    for parameter in parameters:
        _trained[parameter] = parameter.requires_grad


def _together(given: Sequence[Any]) -> tuple[bool, list[float]]:
    """Whether the ranks' graphs have the same operators and inputs, and the constants of all."""
    floats = {constant for _, constants, _ in given for constant in constants}
    return all(graph == given[0][0] for graph, _, _ in given), sorted(floats)


def _lines_of_models(models: Sequence[nn.Module], constants: Container[float]) -> list[str]:
    """The parameters of models, and the attributes of their modules that are among constants."""
    parameters = {name: one for model in reversed(models) for name, one in model.named_parameters()}
    attributes = {
        f"{type(module).__name__}.{name} = {each!r}"
        for model in models
        for module in model.modules()
        for name, each in vars(module).items()
        if type(each) is float and each in constants
    }
    return [*lines_of(parameters), *sorted(attributes)]


def device_room(device: str) -> int | None:
    """Bytes of the smallest device of the world that tensors may fill; None on a CPU, whose memory
    others use too. Collective at the first call of a world."""
    if device != "cuda" or not torch.cuda.is_available():
        return None
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return cluster_of(device).usable_bytes
    return _smallest(device)


@compat.once_a_world
def _smallest(device: str) -> int:
    """Asked when all ranks build their first program."""
    return min(
        gather(cluster_of(device).usable_bytes, "memory of the devices", world_axis(), alike=True)
    )


T = TypeVar("T")


def build_agreed(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    inputs: list[compat.GraphInput],
    mesh: Mesh,
    config: Config,
    device: str,
    facts: Mapping[int, str],
    before: Program | None = None,
) -> Program:
    """`build_program`, and the proof that every rank of the axis built the same.

    Raises PlanMismatchError on all ranks where they did not. One that fails raises its own error,
    and the others PlanMismatchError with it (`attempt` tells them).
    """
    machine = cluster_of(device)
    room = device_room(device) if config.memory_budget is None else None
    program = build_program(
        gm, example_inputs, inputs, mesh, config, machine, facts=facts, room=room, before=before
    )
    own = comparison(program, machine.name, tensors_of(inputs))
    new = bool(unplanned_parameters(inputs, program))
    agree_on_program(program.serial, own, inputs, mesh, config, new)
    return program


def agree_on_program(
    serial: fx.GraphModule,
    own: Compared,
    inputs: list[compat.GraphInput],
    mesh: Mesh,
    config: Config,
    new: bool,
) -> None:
    """Raise PlanMismatchError on all ranks of the mesh where what they built differs.

    new: whether parameters of the graph are about to be stored.
    """
    if config.inner == "inductor":
        compiles()  # tells of the folder of compiled graphs
    lines = own.lines()
    if config.rng == "tracker":  # values that all ranks hold are drawn from states of one seed
        lines.append(f"torch.initial_seed() {torch.initial_seed()}")
    _compare(lines, inputs, mesh)
    agree_on_data_axes(mesh, serial, own, inputs, new)


def agree_on_unsharded(inputs: list[compat.GraphInput], mesh: Mesh, config: Config) -> None:
    """Raise PlanMismatchError on all ranks where only some run the model unsharded."""
    _compare([settings().text(), *config.lines()], inputs, mesh)


def _compare(lines: list[str], inputs: list[compat.GraphInput], mesh: Mesh) -> None:
    for axis in (*reversed(mesh.sharing), mesh.axis("pp")):
        agree("plan", digest_of(lines), lines, axis, note=batch_shapes(inputs))


def comparison(program: Program, machine: str, tensors: Mapping[str, torch.Tensor]) -> Compared:
    """What ranks compare of a program for `machine`, whose parameters are `tensors`."""
    return compared(
        program.serial,
        program.parameters,
        tensors,
        program.config,
        machine,
        program.microbatch,
        _choice_lines(program),
        _plan_lines(program),
    )


def tensors_of(inputs: Sequence[compat.GraphInput]) -> dict[str, nn.Parameter]:
    """The parameters among the inputs of a graph, by name."""
    return {item.name: item.real for item in inputs if isinstance(item.real, nn.Parameter)}


def _choice_lines(program: Program) -> list[str]:
    """What was chosen for the batch and the memory of a program: losses, and what is kept."""
    chosen = program.decisions.recomputation
    again = [] if chosen is None else sorted(chosen.again)
    sent = [] if chosen is None else sorted(chosen.sent)
    losses = [node.name for node, one in program.decisions.losses.items() if one.chunked]
    return [
        f"losses by chunks: {', '.join(losses) or 'none'}",
        f"computed again, in the memory there is: {', '.join(again) or 'nothing'}",
        f"on the host, in the memory there is: {', '.join(sent) or 'nothing'}",
    ]


def _plan_lines(program: Program) -> list[str]:
    """The placement of each parameter, and the strategy of each operator."""
    lines = []
    for name in program.parameters.values():
        choice = program.plan.weights.get(name, "")
        lines.append(f"parameter {name}: {program.plan.parameters[name]} {choice}".rstrip())
    copies = program.plan.graphs[fingerprint(program.serial)].copies
    lines += [f"copy of {name}: {state}" for name, state in copies.items()]
    outer = [] if program.outer is None else program.outer.decisions.lines()
    return [*lines, *program.decisions.lines(), *outer]


def unplanned_parameters(
    inputs: Sequence[compat.GraphInput], program: Program
) -> dict[nn.Parameter, tuple[State, str]]:
    """Parameters of the graph that no graph has planned before, with their planned state, and what
    dp_shard does with them ("" where that is not chosen)."""
    chosen, stored = program.decisions.weights, program.decisions.stored.items()
    places = {node: (state, chosen.get(node, "")) for node, state in stored}
    return unplanned(inputs, program.serial, places)


def unplanned(
    inputs: Sequence[compat.GraphInput], serial: fx.GraphModule, stored: Mapping[fx.Node, T]
) -> dict[nn.Parameter, T]:
    """`unplanned_parameters` of a graph whose placeholders have the states `stored`."""
    placeholders = serial.graph.find_nodes(op="placeholder")
    return {
        item.real: stored[node]
        for node, item in zip(placeholders, inputs, strict=True)
        if isinstance(item.real, nn.Parameter) and not is_planned(item.real)
    }
