"""The columns of a row: texts and figures of what was made, and their digests.

Texts have no address, no path, no line of a file: only a change of what runs changes them.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

import engine_cases
from autoshard import render
from autoshard.building import batch_facts, build_program
from autoshard.building.pipeline import TracedPipeline, build_pipeline, fit_stages
from autoshard.building.pipeline.stage_memory import StageCount
from autoshard.capture import capture, intercept
from autoshard.config import Config, nested
from autoshard.errors import ConfigError, PlanError
from autoshard.export.rank_graph.plan import plan_inference
from autoshard.export.spec import EngineSpec
from autoshard.mesh_search.factorisations import candidates
from autoshard.mesh_search.prices import MeshSearch
from autoshard.mesh_search.search import AXES, search_captured
from autoshard.parameters import lowered_dtypes, use_by
from autoshard.passes import WAIT
from autoshard.planning.cost import cluster
from autoshard.planning.estimate import Layout, Training, profile, timing
from autoshard.program import Program
from autoshard.runtime.mesh import offline_mesh
from autoshard.runtime.parameters import casting
from replay_models import replayed
from replay_rows import Row

TEXTS = ("plan", "local", "forward", "backward", "ledger")
FIGURES = ("peak", "held", "charge", "step")
COLUMNS = (*TEXTS, *FIGURES)


@dataclass
class Replay:
    """texts, by column. figures: bytes at the peak of a step and between two; seconds that the
    planner charges, and of a predicted step. error: why nothing was made, instead."""

    texts: dict[str, str] = field(default_factory=dict)
    figures: dict[str, float] = field(default_factory=dict)
    error: str = ""

    def cells(self) -> dict[str, str]:
        """By column, what stands in the row's line; "-" for what there is nothing of."""
        if self.error:
            return dict.fromkeys(COLUMNS, "-") | {"plan": _digest(self.error)}
        found = {name: _digest(text) for name, text in self.texts.items() if text}
        found |= {name: _figure(value) for name, value in self.figures.items()}
        return {name: found.get(name, "-") for name in COLUMNS}


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _figure(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.6g}"


def replay(rows: Sequence[Row]) -> list[Replay]:
    """What is made of rows; neighbours of one model share its trace."""
    found: list[Replay] = []
    while len(found) < len(rows):
        start = rows[len(found)]
        if start.engine:
            found.append(_engine(start))
            continue
        group = []
        for row in rows[len(found) :]:
            if row.model != start.model or row.engine:
                break
            group.append(row)
        found += _of_one_trace(group)
    return found


def _of_one_trace(rows: Sequence[Row]) -> list[Replay]:
    torch.manual_seed(0)
    torch.compiler.reset()
    one = replayed(rows[0].model)
    use = use_by(_config(rows[0]), None)

    def plan(*graph: Any) -> list[Any]:
        return [_tried(lambda row=row: _made(row, graph)) for row in rows]

    with contextlib.ExitStack() as stack, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Dynamo's, of what transformers caches
        stack.enter_context(torch.set_grad_enabled(not one.served))
        if use.param is not None:
            stack.enter_context(casting(one.model, use))
        made = intercept(one.model, (), one.batch, plan, False)
        return [_tried(lambda each=each: _read(each)) for each in made]


def _tried(make: Callable[[], Any]) -> Any:
    try:
        return make()
    except (ConfigError, PlanError) as error:
        return Replay(error=str(error))


def _config(row: Row) -> Config:
    return Config.from_options(
        nested({"mesh": row.mesh or None, "inner": "aot_eager", **row.options})
    )


def _made(row: Row, graph: Sequence[Any]) -> Program | TracedPipeline | MeshSearch:
    config, machine = _config(row), cluster(row.hardware)
    gm, example, inputs = graph
    if row.world:
        captured = capture(gm, example, lowered_dtypes(inputs))
        meshes = candidates(row.world, machine, AXES, stages=True)
        return search_captured(captured, inputs, meshes, machine, config)
    mesh = offline_mesh(row.mesh, row.rank)
    if (stages := row.mesh.get("pp", 1)) > 1:
        pipeline = build_pipeline(gm, example, inputs, stages, config, machine, mesh.axes)
        fit_stages(pipeline, range(stages), config)
        return TracedPipeline(pipeline)
    facts = batch_facts(inputs)
    return build_program(gm, example, inputs, mesh, config, machine, row.microbatch, facts=facts)


def _read(made: Any) -> Replay:
    match made:
        case Program():
            return _program(made)
        case TracedPipeline():
            return _pipeline(made)
        case MeshSearch():
            return _search(made)
    return made


def _program(made: Program) -> Replay:
    axes, graphs, memory = made.mesh.axes, made.running, made.memory()
    sizes = {axis.name: axis.size for axis in axes if axis.size > 1}
    machine, training = made.machine, Training(states=made.config.optimizer_states)
    config, n = made.config, made.decisions.prices.n
    profiled = profile(
        made.serial, made.decisions, made.parameters, n, machine, config.bucket_bytes, training
    )
    layout = Layout.of(sizes, config.zero, config.bucket_bytes, config.defer_reduction)
    took = timing(profiled, layout, training, machine)
    lines = [
        f"{one.phase} {one.op} {one.axis} {one.bytes} {one.module} {one.change} {one.reader}"
        f"{' fused' if one.fused else ''}"
        for one in made.collectives()
    ]
    return Replay(
        {
            "plan": made.plan.text(),
            "local": text_of(made.graph_module, axes),
            "forward": text_of(graphs.forward, axes),
            "backward": text_of(graphs.backward, axes),
            "ledger": "\n".join(lines),
        },
        {
            "peak": memory.peak,
            "held": memory.total,
            "charge": made.decisions.seconds,
            "step": took.step,
        },
    )


def _pipeline(made: TracedPipeline) -> Replay:
    program = made.program
    counts = [StageCount(program, number) for number in range(len(made.stages))]
    held = [count(program.recomputed.get(number)) for number, count in enumerate(counts)]
    return Replay(
        {
            "plan": made.plan.text() + "\n".join(program.lines()),
            "local": "\n".join(map(text_of, made.stages)),
            "forward": "\n".join(text_of(count.free.forward) for count in counts),
            "backward": "\n".join(text_of(count.free.backward) for count in counts),
            "ledger": "\n".join(map(str, [*made.sent_bytes, program.exchanges()])),
        },
        {
            "peak": max(one.peak for one in held),
            "held": sum(one.parameters + one.gradients for one in held),
            "charge": max(map(program.stage_seconds, range(len(counts)))),
            "step": program.timeline().seconds,
        },
    )


def _search(made: MeshSearch) -> Replay:
    """The plan is that of all rows, the ledger the table."""
    lines = [
        f"{row.mesh} {row.memory} {_rounded(row.timing)} {row.unfit} {row.refused} "
        f"{row.microbatches} {row.chunked_losses}"
        for row in made.rows
    ]
    best = made.rows[0]
    return Replay(
        {"plan": "".join(row.plan.text() for row in made.rows), "ledger": "\n".join(lines)},
        {"peak": best.memory.total, "step": best.timing.step},
    )


def _rounded(timing: Any) -> str:
    figures = (timing.step, timing.compute, timing.exposed, timing.optimizer)
    sent = {
        axis: (f"{one.nbytes:.6g}", one.collectives) for axis, one in sorted(timing.traffic.items())
    }
    return f"{' '.join(f'{each:.6g}' for each in figures)} {sent}"


def _engine(row: Row) -> Replay:
    torch.compiler.reset()
    spec = EngineSpec(
        mesh=row.mesh or {"tp": 1}, dynamic=engine_cases.DYNAMIC, max_length=row.engine
    )
    plan = plan_inference(engine_cases.make(row.model, num_hidden_layers=1), spec)
    graph = plan.rank_graph(row.rank)
    ports = [f"{port.role} {port.name} {port.shape} {port.dtype}" for port in graph.inputs]
    ports += [f"-> {port.role} {port.name} {port.shape}" for port in graph.outputs]
    return Replay(
        {
            "plan": plan.program.plan.text(),
            "local": text_of(graph.module, [graph.axis]) + "\n".join(ports),
        },
        {"charge": plan.program.decisions.seconds},
    )


def text_of(gm: fx.GraphModule | None, axes: Iterable[Any] = ()) -> str:
    """A graph as text: as `render` has it, its symbols numbered as they come (torch numbers one
    by how many tensors the process held), and what that leaves out: where collectives are waited
    for, and long arguments."""
    if gm is None:
        return ""
    numbers = {node: i for i, node in enumerate(gm.graph.nodes)}
    waits = [f"{numbers[n.args[0]]}-{i}" for n, i in numbers.items() if n.target is WAIT]
    long = [arg for n in numbers for arg in n.args if isinstance(arg, str) and len(arg) > 60]
    numbered: dict[str, str] = {}
    text = re.sub(
        r"\bs\d+\b",
        lambda found: numbered.setdefault(found[0], f"s{len(numbered)}"),
        render(gm, axes=tuple(axes)),
    )
    return "\n".join([text, f"waits {' '.join(waits)}", *long])
