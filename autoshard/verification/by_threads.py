"""The quick form of `verify`: all ranks of the mesh as threads of this process, in lockstep.

One forward and backward of the captured graph, with noise as the gradient of its outputs. The
backend, its compilers, its storage and the optimizer do not take part: what is checked are the
plan, the rules, the rewritten graphs and their collectives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from autoshard.build import build_program
from autoshard.capture import intercept
from autoshard.config import Config
from autoshard.planning.cost import hardware_of
from autoshard.program import Program
from autoshard.runtime import compat
from autoshard.runtime.collectives import R
from autoshard.runtime.mesh import Mesh, offline_mesh
from autoshard.verification.program_check import Report, verify_program
from autoshard.verification.subject import Subject, chunks
from autoshard.verification.tolerance import Row, floor_of


def rows_in_process(
    subject: Subject, sizes: Mapping[str, int], options: Mapping[str, Any], tolerance: float | None
) -> list[Row]:
    """The comparisons, as `verify` makes them; a difference among ranks that should hold one value
    is a row too. Raises what torch.compile(fullgraph=True) raises where the graph breaks, and
    ValueError where data-parallel ranks draw random numbers."""
    model, args, kwargs = subject.load()
    mesh = offline_mesh(sizes, 0)
    parts = chunks((args, kwargs), mesh.size // mesh.axis("tp").size)
    config = Config.from_options({**options, "mesh": dict(sizes)})
    program, values = _traced(model, parts[0], mesh, config)
    others = [_traced(model, part, mesh, config)[1] for part in parts[1:]]
    allowed = floor_of(model) if tolerance is None else tolerance
    try:
        report = verify_program(program, values, seed=subject.seed, others=others)
    except AssertionError as error:
        return [Row("ranks", str(error).strip().splitlines()[0], "", float("inf"), 0.0, 1, 0)]
    return _rows(report, program, allowed)


def _rows(report: Report, program: Program, allowed: float) -> list[Row]:
    stored = {}
    for node, name in program.parameters.items():
        states = {program.axis.name: program.decisions.stored[node], **program.data[node]}
        axes = [axis.name for axis in program.mesh.axes]
        stored[name] = ", ".join(f"{axis} {states.get(axis, R)}" for axis in axes)
    found = [("output", name, error) for name, error in report.outputs.items()]
    found += [("gradient", name, error) for name, error in report.norms.items()]
    return [
        Row(kind, name, stored.get(name, ""), error, allowed, 1, 0) for kind, name, error in found
    ]


def _traced(
    model: torch.nn.Module, part: Any, mesh: Mesh, config: Config
) -> tuple[Program, list[Any]]:
    """The program of a call, and the whole value of each placeholder of its serial graph."""
    values: list[Any] = []

    def plan(
        gm: fx.GraphModule, example: Sequence[Any], inputs: list[compat.GraphInput]
    ) -> Program:
        values.extend(int(e) if i.real is None else i.real for i, e in zip(inputs, example))
        return build_program(gm, example, inputs, mesh, config, hardware_of("cpu"))

    return intercept(model, part[0], part[1], plan, dynamic=False), values
