"""Every rank builds the same program, or every rank raises."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import fx, nn

from autoshard.building.batch_check import batch_shapes
from autoshard.building.data_ranks import (
    agree_on_data_axes,
    digest_of,
    loss_lines,
    node_line,
    program_options,
)
from autoshard.building.device_room import device_room
from autoshard.building.one_rank import build_program
from autoshard.compiling import settings
from autoshard.config import Config
from autoshard.planning import fingerprint, strategy_text, value
from autoshard.planning.cost import hardware_of
from autoshard.program import Program
from autoshard.runtime import compat
from autoshard.runtime.agreement import agree
from autoshard.runtime.collectives import State
from autoshard.runtime.mesh import Mesh
from autoshard.runtime.parameters import is_planned

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
    machine = hardware_of(device)
    room = device_room(device) if config.memory_budget is None else None
    program = build_program(
        gm, example_inputs, inputs, mesh, config, machine, facts=facts, room=room
    )
    wishes = settings().text()  # of the environment, which may differ between machines
    lines = [wishes, f"hardware: {machine.name}", *plan_lines(program)]
    if config.rng == "tracker":  # values that all ranks hold are drawn from states of one seed
        lines.append(f"torch.initial_seed() {torch.initial_seed()}")
    for axis in reversed(mesh.sharing):
        agree("plan", digest_of(lines), lines, axis, note=batch_shapes(inputs))
    new = bool(unplanned_parameters(inputs, program))
    options = program_options(program)
    agree_on_data_axes(mesh, program.serial, program.parameters, options, inputs, new)
    return program


def plan_lines(program: Program) -> list[str]:
    """The lines that ranks compare: options, each parameter's placement, and each node with its
    constants, shape, dtype and strategy."""
    lines = [f"gradients: {program.microbatch}", *program.config.lines()]
    for node, name in program.parameters.items():
        frozen = "" if value(node).requires_grad else ", frozen"
        choice = program.plan.weights.get(name, "")
        lines.append(f"parameter {name}: {program.plan.parameters[name]}{frozen} {choice}".rstrip())
    strategies = program.decisions.strategies
    for node in program.serial.graph.nodes:
        text = f": {strategy_text(strategies[node])}" if node in strategies else ""
        lines.append(f"{node_line(node, program.parameters)}{text}")
    copies = program.plan.graphs[fingerprint(program.serial)].copies
    chosen = program.decisions.recomputation
    if chosen is not None:
        lines.append(f"computed again: {', '.join(sorted(chosen.again))}")
        lines.append(f"on the host: {', '.join(sorted(chosen.sent))}")
    lines.append(f"losses by chunks: {', '.join(loss_lines(program)) or 'none'}")
    lines += [f"copy of {name}: {state}" for name, state in copies.items()]
    if program.outer is not None:
        first = program.outer.decisions.strategies.items()
        on = program.outer.axis.name
        lines += [f"{node.name} on {on}: {strategy_text(strategy)}" for node, strategy in first]
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
