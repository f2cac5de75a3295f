"""The bytes a rank holds of one of its stages: the stage's graphs, counted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import fx

from autoshard.building.pipeline.program import PipelineProgram
from autoshard.building.pipeline.stage_graphs import adding_up, graded_parameters, loss_of
from autoshard.building.pipeline.stages import stored_dtype, sum_dtype
from autoshard.compiling import add_at_once, cut_backward, off_meta
from autoshard.memory import StageMemory, memory_of_split_stage, memory_of_stage
from autoshard.passes import after_cut, set_fate
from autoshard.planning import Recomputation, tensor_bytes, value
from autoshard.runtime import compat
from autoshard.runtime.collectives import shard_dim
from autoshard.runtime.pipeline import most_kept


class StageCount:
    """What a rank holds of a stage in a training step, with any choice of what is computed again.

    AOTAutograd runs once for all of them.
    """

    def __init__(self, program: PipelineProgram, number: int) -> None:
        self.program, self.stage = program, program.plan.stages[number]
        self.chunk, self.rank = divmod(number, program.ranks)
        count = len(self.stage.parameters)
        graph = self.stage.training(loss_of(program.microbatch))
        graded = graded_parameters(graph, count)
        dtypes = [sum_dtype(program.microbatch.parameters[i]) for i in self.stage.parameters]
        self.sums = {i: dtypes[i] for i in graded}
        self.split = program.schedule == "zb1"
        self.graph = graph if self.split else adding_up(graph, graded, dtypes)
        self.placeholders = self.graph.graph.find_nodes(op="placeholder")
        self.own = self.placeholders[:count]
        self.given = _differentiable(self.graph, self.placeholders)
        self.joints: list[compat.JointGraph] = []
        self.free = compat.forward_backward(*self.given, after_cut, self.joints)
        self.counted: dict[Recomputation | None, StageMemory] = {}

    def __call__(self, chosen: Recomputation | None) -> StageMemory:
        """chosen: None: what the compiler likes."""
        if chosen not in self.counted:
            graphs = self.free
            if chosen is not None and self.joints:
                again: Recomputation = chosen
                graphs = self.joints[0].split(lambda node: set_fate(node, again))
            self.counted[chosen] = self._of(graphs)
        return self.counted[chosen]

    def _of(self, graphs: compat.ForwardBackward) -> StageMemory:
        micro, stage = self.program.microbatch, self.stage
        rows = self.placeholders[len(self.own) :][: len(stage.shared)]
        parts = [
            micro.microbatches if shard_dim(micro.shared[i][1]) is not None else 1
            for i in stage.shared
        ]
        shared = sum(tensor_bytes(value(node)) * n for node, n in zip(rows, parts))
        held = self._split(graphs, shared) if self.split else self._whole(graphs, shared)
        lowered = [node for node in self.own if stored_dtype(node) != value(node).dtype]
        return replace(
            held,
            parameters=held.parameters
            + sum(value(node).numel() * stored_dtype(node).itemsize for node in lowered),
            gradients=sum(
                value(node).numel() * sum_dtype(node).itemsize
                for node in self.own
                if value(node).requires_grad
            ),
        )

    def _whole(self, graphs: compat.ForwardBackward, shared: int) -> StageMemory:
        if graphs.backward is not None:
            add_at_once(graphs.backward)
        live = most_kept(self.program.schedule, self.program.shape, self.rank)[self.chunk]
        received = sum(tensor_bytes(value(node)) for node in self.stage.received)
        return memory_of_stage(graphs, list(map(value, self.own)), received, live, shared)

    def _split(self, graphs: compat.ForwardBackward, shared: int) -> StageMemory:
        stage, given = self.stage, self.given
        cut = cut_backward(*given, self.sums, len(stage.reads), graphs)
        sizes = [tensor_bytes(value(node)) for node in stage.received]
        read = [sizes[i] for i in stage.reads]
        works = [a.work for a in self.program.actions(self.rank) if a.chunk == self.chunk]
        passed = sum(sizes) - sum(read)
        return memory_of_split_stage(cut, list(map(value, self.own)), read, passed, works, shared)


def _differentiable(graph: fx.GraphModule, placeholders: list[fx.Node]) -> tuple[Any, Any]:
    """On meta losses have no derivative."""
    return off_meta(graph, compat.backend_fakes(list(placeholders)))
