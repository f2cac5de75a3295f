"""One rank's part of a pipeline: its stage's graph compiled, its actions, what it lends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from autoshard.building.pipeline.microbatch import shared_graph
from autoshard.building.pipeline.program import PipelineProgram
from autoshard.building.pipeline.stages import PipelineStage
from autoshard.compiling import compile_local
from autoshard.planning import value
from autoshard.runtime import compat
from autoshard.runtime.collectives import Axis, home_rank, shard_dim
from autoshard.runtime.graph_meta import DIFF
from autoshard.runtime.pipeline import (
    SCHEDULES,
    Loan,
    PipelineResult,
    RankPipeline,
    StageProgram,
    ValueMeta,
)


def rank_pipeline(program: PipelineProgram, axis: Axis, inner: str) -> RankPipeline:
    """The part of the rank at its place on `axis`, compiled."""
    microbatch, plan = program.microbatch, program.plan
    stage = plan.stages[axis.rank]
    keys = [microbatch.shared[i] for i in stage.shared]
    order = list(program.parameters)
    place = {node: i for i, node in enumerate(order)}
    stored = program.stored()
    makers = {i: number for number, each in enumerate(plan.stages) for i in each.results}
    outputs: Any = microbatch.serial.graph.output_node().args[0]
    return RankPipeline(
        axis=axis,
        stage=stage_program(program, axis.rank, inner),
        actions=SCHEDULES[program.schedule](axis.rank, axis.size, microbatch.microbatches),
        microbatches=microbatch.microbatches,
        parameters=[place[microbatch.parameters[i]] for i in stage.parameters],
        homes=[home_rank(stored[node]) for node in order],
        loans=[
            Loan(place[node], meta_of(node, value(node).requires_grad), home, number)
            for i, node in enumerate(microbatch.parameters)
            for number, each in enumerate(plan.stages)
            if i in each.parameters
            for home in [home_rank(stored[node])]
            if home is not None and home != number
        ],
        shared=_shared(microbatch.serial, [node for node, _ in keys], axis),
        dims=[shard_dim(state) for _, state in keys],
        results=[
            PipelineResult(position, _like(outputs[position]), state, makers[i])
            for i, (position, state) in enumerate(zip(microbatch.positions, microbatch.states))
        ],
        loss=microbatch.loss,
    )


def stage_program(program: PipelineProgram, number: int, inner: str) -> StageProgram:
    """A stage, compiled: each rank compiles its own."""
    stage = program.plan.stages[number]
    positions = program.microbatch.positions
    first = len(stage.sent) - stage.made.count(None)
    results = [(positions[i], first + at) for at, i in enumerate(stage.results)]
    loss = next((at for position, at in results if position == program.microbatch.loss), None)
    return StageProgram(
        run=_compiled(stage, inner),
        number=number,
        stages=program.size,
        reads=stage.reads,
        received=[meta_of(node) for node in stage.received],
        sent=[meta_of(node) for node in stage.sent],
        made=stage.made,
        passed=[
            stage.received.index(node) if at is None else None
            for node, at in zip(stage.sent, stage.made)
        ],
        results=results,
        loss=loss,
    )


def meta_of(node: fx.Node, graded: bool | None = None) -> ValueMeta:
    """What is known of a value before it arrives. graded: whether it has a gradient."""
    val = value(node)
    has = bool(node.meta.get(DIFF)) if graded is None else graded
    return ValueMeta(tuple(val.shape), val.dtype, has)


def _compiled(stage: PipelineStage, inner: str) -> Callable[..., Any]:
    placeholders = stage.graph.graph.find_nodes(op="placeholder")
    if not list(stage.graph.graph.output_node().args[0]):  # type: ignore[arg-type]
        return lambda *_: ()
    return compile_local(stage.graph, compat.backend_fakes(list(placeholders)), inner)


def _shared(serial: fx.GraphModule, nodes: list[fx.Node], axis: Axis) -> Callable[..., Any]:
    graph = shared_graph(serial, nodes, axis)
    return lambda *inputs: graph(*inputs)


def _like(node: fx.Node) -> torch.Tensor:
    """The shape of an output, on the meta device: Withheld stand-ins are made of it."""
    val = value(node)
    return torch.empty(tuple(val.shape), dtype=val.dtype, device="meta")
