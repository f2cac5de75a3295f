"""The quick form of `verify`: all ranks of the mesh as threads of this process, in lockstep.

One forward and backward of the captured graph, with noise as the gradient of its outputs. The
backend, its compilers, its storage and the optimizer do not take part: what is checked are the
plan, the rules, the rewritten graphs and their collectives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from autoshard.building import batch_facts, build_program
from autoshard.capture import intercept
from autoshard.config import Config
from autoshard.errors import ConfigError, message
from autoshard.planning.cost import cluster_of
from autoshard.program import Program
from autoshard.runtime import compat
from autoshard.runtime.collectives import I, placement_words
from autoshard.runtime.mesh import Mesh, offline_mesh
from autoshard.verification.comparison import Comparison, floor_of
from autoshard.verification.program_check import Differences, verify_program
from autoshard.verification.subject import Subject, chunks

ROUNDING = 100.0
"""Times the tolerance that rounding may reach in a deep model; more is a fault in any dtype."""


def compare_by_threads(
    subject: Subject, sizes: Mapping[str, int], options: Mapping[str, Any], tolerance: float | None
) -> tuple[list[Comparison], list[str]]:
    """The comparisons, and notes on them; in float64 where rounding may be all that differs."""
    notes = ["ranks were threads of one process"]
    found = _comparisons(subject, sizes, options, tolerance)
    furthest = max((one.excess for one in found), default=0.0)
    if tolerance is None and subject.dtype is None and 1.0 < furthest < ROUNDING:
        try:
            wide = replace(subject, dtype=torch.float64)
            found = _comparisons(wide, sizes, options, tolerance)
            notes.append(f"float64: in the model's own dtype, {furthest:.1f} times the tolerance")
        except Exception as error:  # a dtype written into the model, an operator without float64
            notes.append(f"no float64 run to tell rounding from faults: {type(error).__name__}")
    return found, notes


def _comparisons(
    subject: Subject, sizes: Mapping[str, int], options: Mapping[str, Any], tolerance: float | None
) -> list[Comparison]:
    """The comparisons, as `verify` makes them; a difference among ranks that should hold one value
    is one too. Raises what torch.compile(fullgraph=True) raises where the graph breaks, and
    ValueError where data-parallel ranks draw random numbers."""
    if sizes.get("pp", 1) > 1:
        raise ConfigError(
            message(
                f"processes=False runs the ranks of one graph in lockstep, and those of "
                f"pp={sizes['pp']} run graphs of their own",
                remedy="Leave processes=False out, or pp.",
            )
        )
    model, args, kwargs = subject.load()
    mesh = offline_mesh(sizes, 0)
    parts = chunks((args, kwargs), mesh.batches)
    config = Config.from_options({**options, "mesh": dict(sizes)})
    program, values = _traced(model, parts[0], mesh, config)
    others = [_traced(model, part, mesh, config)[1] for part in parts[1:]]
    allowed = floor_of(model) if tolerance is None else tolerance
    try:
        differences = verify_program(program, values, seed=subject.seed, others=others)
    except AssertionError as error:
        told = str(error).strip().splitlines()[0]
        return [Comparison(kind="ranks", name=told, error=float("inf"))]
    return _judged(differences, program, allowed)


def _judged(differences: Differences, program: Program, allowed: float) -> list[Comparison]:
    stored = {}
    for node, name in program.parameters.items():
        states = {program.axis.name: program.decisions.stored[node], **program.data[node]}
        axes = [axis.name for axis in program.mesh.axes]
        stored[name] = ", ".join(f"{axis} {placement_words(states.get(axis, I))}" for axis in axes)
    found = [("output", name, error) for name, error in differences.outputs.items()]
    found += [("gradient", name, error) for name, error in differences.norms.items()]
    return [
        Comparison(
            kind=kind, name=name, placement=stored.get(name, ""), error=error, tolerance=allowed
        )
        for kind, name, error in found
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
        return build_program(
            gm, example, inputs, mesh, config, cluster_of("cpu"), facts=batch_facts(inputs)
        )

    return intercept(model, part[0], part[1], plan, dynamic=False), values
