"""The bytes a rank holds of one of its stages: the stage's graphs, counted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import fx

from autoshard.building.pipeline.gradient_sums import adding_up, graded_parameters
from autoshard.building.pipeline.program import PipelineProgram
from autoshard.building.pipeline.stage_graphs import PipelineStage, loss_of
from autoshard.building.pipeline.stages import stored_dtype, sum_dtype
from autoshard.compiling import add_at_once, cut_backward, off_meta
from autoshard.memory import StageMemory, memory_of_split_stage, memory_of_stage
from autoshard.planning import tensor_bytes, value
from autoshard.runtime import compat
from autoshard.runtime.collectives import shard_dim
from autoshard.runtime.pipeline import most_kept


def stage_memory(
    program: PipelineProgram, stage: PipelineStage, rank: int, chunk: int
) -> StageMemory:
    """What a rank holds of its stage of number `chunk`, in a training step."""
    micro, count = program.microbatch, len(stage.parameters)
    graph = stage.training(loss_of(micro))
    placeholders = graph.graph.find_nodes(op="placeholder")
    own, rows = placeholders[:count], placeholders[count:][: len(stage.shared)]
    parts = [
        micro.microbatches if shard_dim(micro.shared[i][1]) is not None else 1 for i in stage.shared
    ]
    shared = sum(tensor_bytes(value(node)) * n for node, n in zip(rows, parts))
    counted = _split if program.schedule == "zb1" else _whole
    held = counted(program, stage, graph, rank, chunk, shared)
    lowered = [node for node in own if stored_dtype(node) != value(node).dtype]
    return replace(
        held,
        parameters=held.parameters
        + sum(value(node).numel() * stored_dtype(node).itemsize for node in lowered),
        gradients=sum(
            value(node).numel() * sum_dtype(node).itemsize
            for node in own
            if value(node).requires_grad
        ),
    )


def _whole(
    program: PipelineProgram,
    stage: PipelineStage,
    graph: fx.GraphModule,
    rank: int,
    chunk: int,
    shared: int,
) -> StageMemory:
    count = len(stage.parameters)
    sums = [sum_dtype(program.microbatch.parameters[i]) for i in stage.parameters]
    graph = adding_up(graph, graded_parameters(graph, count), sums)
    placeholders = graph.graph.find_nodes(op="placeholder")
    graphs = compat.forward_backward(*_differentiable(graph, placeholders))
    if graphs.backward is not None:
        add_at_once(graphs.backward)
    live = most_kept(program.schedule, program.shape, rank)[chunk]
    received = sum(tensor_bytes(value(node)) for node in stage.received)
    own = [value(node) for node in placeholders[:count]]
    return memory_of_stage(graphs, own, received, live, shared)


def _split(
    program: PipelineProgram,
    stage: PipelineStage,
    graph: fx.GraphModule,
    rank: int,
    chunk: int,
    shared: int,
) -> StageMemory:
    count = len(stage.parameters)
    placeholders = graph.graph.find_nodes(op="placeholder")
    dtypes = [sum_dtype(program.microbatch.parameters[i]) for i in stage.parameters]
    sums = {i: dtypes[i] for i in graded_parameters(graph, count)}
    cut = cut_backward(*_differentiable(graph, placeholders), sums, len(stage.reads))
    sizes = [tensor_bytes(value(node)) for node in stage.received]
    read = [sizes[i] for i in stage.reads]
    own = [value(node) for node in placeholders[:count]]
    works = [each.work for each in program.actions(rank) if each.chunk == chunk]
    return memory_of_split_stage(cut, own, read, sum(sizes) - sum(read), works, shared)


def _differentiable(graph: fx.GraphModule, placeholders: list[fx.Node]) -> tuple[Any, Any]:
    """On meta losses have no derivative."""
    return off_meta(graph, compat.backend_fakes(list(placeholders)))
