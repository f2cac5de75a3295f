"""Every rank builds the same program, or every rank raises."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import fx, nn

from autoshard.building.batch_check import batch_shapes
from autoshard.building.compared import Compared, agree_on_data_axes, compared, digest_of
from autoshard.building.one_rank import build_program
from autoshard.compiling import settings
from autoshard.config import Config
from autoshard.planning import fingerprint, strategy_text
from autoshard.planning.cost import cluster_of
from autoshard.program import Program
from autoshard.runtime import compat
from autoshard.runtime.agreement import agree, gather, world_axis
from autoshard.runtime.collectives import State
from autoshard.runtime.mesh import Mesh
from autoshard.runtime.parameters import is_planned


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
    return min(gather(cluster_of(device).usable_bytes, "memory of the devices", world_axis()))


T = TypeVar("T")


def build_agreed(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    inputs: list[compat.GraphInput],
    mesh: Mesh,
    config: Config,
    device: str,
    facts: Mapping[int, str],
) -> Program:
    """`build_program`, and the proof that every rank of the axis built the same.

    Raises PlanMismatchError on all ranks where they did not. One that fails raises its own error,
    and the others PlanMismatchError with it (`attempt` tells them).
    """
    machine = cluster_of(device)
    room = device_room(device) if config.memory_budget is None else None
    program = build_program(
        gm, example_inputs, inputs, mesh, config, machine, facts=facts, room=room
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
    made = [(program.axis.name, program.decisions)]
    if program.outer is not None:
        made.append((program.outer.axis.name, program.outer.decisions))
    for on, decisions in made:
        found = decisions.strategies.items()
        lines += [f"{node.name} on {on}: {strategy_text(one)}" for node, one in found]
    return lines


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
