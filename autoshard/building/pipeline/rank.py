"""One rank's part of a pipeline: its stage's graph compiled, its actions, what it lends."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from autoshard.building.pipeline.microbatch import shared_graph
from autoshard.building.pipeline.program import PipelineProgram
from autoshard.building.pipeline.stage_graphs import adding_up, graded_parameters
from autoshard.building.pipeline.stages import sum_dtype
from autoshard.compiling import SplitBackward, add_at_once, compile_local
from autoshard.passes import set_fate
from autoshard.planning import value
from autoshard.runtime import compat
from autoshard.runtime.collectives import Axis, home_rank, shard_dim
from autoshard.runtime.errors import source_line
from autoshard.runtime.graph_meta import DIFF
from autoshard.runtime.pipeline import (
    Loan,
    PipelineResult,
    RankPipeline,
    StageProgram,
    ValueMeta,
)


def rank_pipeline(
    program: PipelineProgram, axis: Axis, sharing: Sequence[Axis], inner: str, train: bool
) -> RankPipeline:
    """The part of the rank at its place on `axis` and on `sharing`, the axes of a stage, compiled.

    train: whether calls are differentiated.
    """
    microbatch, plan = program.microbatch, program.plan
    numbers = range(axis.rank, len(plan.stages), axis.size)
    own = [plan.stages[number] for number in numbers]
    shared = sorted({i for stage in own for i in stage.shared})
    keys = [microbatch.shared[i] for i in shared]
    order = list(program.parameters)
    place = {node: i for i, node in enumerate(order)}
    stored = program.stored()
    makers = {i: number for number, each in enumerate(plan.stages) for i in each.results}
    outputs: Any = microbatch.serial.graph.output_node().args[0]
    local = microbatch.local.graph.find_nodes(op="placeholder")  # of parameters first
    return RankPipeline(
        axis=axis,
        stages=[
            replace(
                stage_program(program, number, inner, train),
                parameters=[place[microbatch.parameters[i]] for i in stage.parameters],
                shared=[shared.index(i) for i in stage.shared],
            )
            for number, stage in zip(numbers, own)
        ],
        actions=program.actions(axis.rank),
        microbatches=microbatch.microbatches,
        homes=[home_rank(stored[node]) for node in order],
        sums=[sum_dtype(node) for node in order],
        loans=[
            Loan(place[node], meta_of(local[i], value(node).requires_grad), home, reader)
            for i, node in enumerate(microbatch.parameters)
            for reader in program.readers(i)
            for home in [home_rank(stored[node])]
            if home is not None and home != reader
        ],
        shared=shared_graph(microbatch.serial, [node for node, _ in keys], axis, sharing),
        dims=[shard_dim(state) for _, state in keys],
        results=[
            PipelineResult(
                position,
                _like(outputs[position]),
                state,
                makers[i] % axis.size,
                makers[i] // axis.size,
                [(inside, states[i]) for inside, states in microbatch.shards],
                position in microbatch.graded,
            )
            for i, (position, state) in enumerate(zip(microbatch.positions, microbatch.states))
        ],
        loss=microbatch.loss,
        kept=microbatch.kept | microbatch.written.keys(),
        given=frozenset(place[node] for node in program.given),
        parts=[inside for inside in sharing if inside.name == "cp"],
    )


def stage_program(
    program: PipelineProgram, number: int, inner: str, train: bool = True
) -> StageProgram:
    """A stage, compiled: each rank compiles its own. train: as for `rank_pipeline`."""
    stage, microbatch = program.plan.stages[number], program.microbatch
    loss, returned = microbatch.loss, stage.results
    graph, parts, graded = stage.graph, None, list[int]()
    if train and microbatch.graded:
        graph, returned = stage.training(microbatch), stage.returned(microbatch)
        if number in program.recomputed:
            for node in graph.graph.nodes:
                set_fate(node, program.recomputed[number])
        graded = graded_parameters(graph, len(stage.parameters))
        sums = [sum_dtype(microbatch.parameters[i]) for i in stage.parameters]
        if program.schedule == "zb1":
            fakes = compat.backend_fakes(list(graph.graph.find_nodes(op="placeholder")))
            kept = {i: sums[i] for i in graded}
            parts = SplitBackward(graph, fakes, kept, len(stage.reads), inner)
        else:
            graph = adding_up(graph, graded, sums)
    first = len(stage.sent) - stage.made.count(None)
    results = [(microbatch.positions[i], first + at) for at, i in enumerate(returned)]
    return StageProgram(
        run=_compiled(graph, inner) if parts is None else graph,
        parts=parts,
        graded=graded,
        number=number,
        ranks=program.ranks,
        reads=stage.reads,
        received=[meta_of(node) for node in stage.received],
        sent=[meta_of(node) for node in stage.sent],
        made=stage.made,
        passed=[
            stage.received.index(node) if at is None else None
            for node, at in zip(stage.sent, stage.made)
        ],
        results=results,
        loss=next((at for position, at in results if position == loss), None),
    )


def meta_of(node: fx.Node, graded: bool | None = None) -> ValueMeta:
    """What is known of a value before it arrives. graded: whether it has a gradient."""
    val = value(node)
    has = bool(node.meta.get(DIFF)) if graded is None else graded
    return ValueMeta(tuple(val.shape), val.dtype, has, source_line(node.meta.get("stack_trace")))


def _compiled(graph: fx.GraphModule, inner: str) -> Callable[..., Any]:
    placeholders = graph.graph.find_nodes(op="placeholder")
    if not list(graph.graph.output_node().args[0]):  # type: ignore[arg-type]
        return lambda *_: ()
    return compile_local(graph, compat.backend_fakes(list(placeholders)), inner, add_at_once)


def _like(node: fx.Node) -> torch.Tensor:
    """The shape of an output, on the meta device: Withheld stand-ins are made of it."""
    val = value(node)
    return torch.empty(tuple(val.shape), dtype=val.dtype, device="meta")
