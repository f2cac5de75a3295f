"""What one may ask of a pipeline before any process starts: `autoshard.trace` on a mesh with pp."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, replace
from typing import NoReturn

from torch import fx

from autoshard.building.pipeline.gradient_sums import adding_up, graded_parameters
from autoshard.building.pipeline.program import PipelineProgram
from autoshard.building.pipeline.stages import (
    PipelineStage,
    loss_of,
    stored_dtype,
    sum_dtype,
)
from autoshard.compiling import add_at_once, off_meta
from autoshard.errors import ConfigError, message
from autoshard.explain import human, table
from autoshard.memory import StageMemory, memory_of_stage
from autoshard.planning import tensor_bytes, value
from autoshard.runtime import compat
from autoshard.runtime.collectives import shard_dim
from autoshard.runtime.pipeline import most_kept


@dataclass(frozen=True)
class TracedPipeline:
    """A model cut into the stages of a pipeline: the same on all ranks."""

    program: PipelineProgram

    @property
    def stages(self) -> list[fx.GraphModule]:
        """The graph of each stage, of one micro-batch. Stage s is on rank s % pp."""
        return [stage.graph for stage in self.program.plan.stages]

    @property
    def microbatches(self) -> int:
        """Parts in which a call runs its batch."""
        return self.program.shape.microbatches

    @property
    def sent_bytes(self) -> list[int]:
        """Bytes that each stage but the last sends to the next, of one micro-batch."""
        return self.program.plan.sent_bytes

    @property
    def idle(self) -> float:
        """The part of a step that ranks wait, as the search prices the stages."""
        return self.program.idle()

    @property
    def plan(self) -> NoReturn:
        """Not there: no plan file holds stages. Raises ConfigError."""
        raise ConfigError(
            message(
                f"a plan of a mesh with pp={self.program.ranks}: no plan file holds stages",
                remedy="Give the options of the mesh, from which each run cuts the same stages, or "
                "trace a mesh without pp.",
            )
        )

    def picture(self) -> str:
        """The schedule as text, where stages take equally long."""
        return self.program.picture()

    def memory(self) -> list[StageMemory]:
        """What a rank holds of each stage in a training step, run operator by operator."""
        shape, stages = self.program.shape, self.program.plan.stages
        kept = [most_kept(self.program.schedule, shape, rank) for rank in range(shape.ranks)]
        numbered = [(number % shape.ranks, number // shape.ranks) for number in range(len(stages))]
        return [self._memory(s, kept[rank][chunk]) for s, (rank, chunk) in zip(stages, numbered)]

    def explain(self, width: int = 100) -> str:
        """The stages, what they send and hold, what they wait, and the picture of the schedule.

        width: columns that the parameters of a stage may fill.
        """
        plan, ranks, count = self.program.plan, self.program.ranks, self.microbatches
        rows = []
        for number, (stage, held) in enumerate(zip(plan.stages, self.memory())):
            rows.append(
                [
                    f"{number} on rank {number % ranks}",
                    str(sum(node.op == "call_function" for node in stage.graph.graph.nodes)),
                    f"{1e3 * plan.stage_seconds[number]:.3g}",
                    human([*plan.sent_bytes, 0][number]),
                    human(held.parameters),
                    human(held.gradients),
                    f"{held.live} x {human(held.kept)}",
                    human(held.peak),
                ]
            )
        header = ["stage", "operators", "ms", "sends", "params", "grads", "keeps", "peak"]
        first, *others = self.program.stage_lines()
        lines = [
            f"{first}; {human(2 * count * sum(plan.sent_bytes))} sent in a step",
            "",
            table(header, rows, right=range(1, len(header))),
            "",
            "ms: of a micro-batch, forward and backward; sends: of a micro-batch, and its gradient "
            "comes",
            "back; keeps: micro-batches whose activations are there at once; peak: without the "
            "optimizer.",
            "",
            *(textwrap.shorten(line, width) for line in others),
            "",
            self.picture(),
        ]
        return "\n".join(line.rstrip() for line in lines) + "\n"

    def _memory(self, stage: PipelineStage, live: int) -> StageMemory:
        micro = self.program.microbatch
        graph = stage.training(loss_of(micro))
        sums = [sum_dtype(micro.parameters[i]) for i in stage.parameters]
        graph = adding_up(graph, graded_parameters(graph, len(stage.parameters)), sums)
        placeholders = graph.graph.find_nodes(op="placeholder")
        rows = placeholders[len(stage.parameters) :][: len(stage.shared)]
        parts = [
            micro.microbatches if shard_dim(micro.shared[i][1]) is not None else 1
            for i in stage.shared
        ]
        fakes = compat.backend_fakes(list(placeholders))
        # on meta losses have no derivative
        graphs = compat.forward_backward(*off_meta(graph, fakes))
        if graphs.backward is not None:
            add_at_once(graphs.backward)
        held = memory_of_stage(
            graphs,
            [value(node) for node in placeholders[: len(stage.parameters)]],
            sum(tensor_bytes(value(node)) for node in stage.received),
            live,
            sum(tensor_bytes(value(node)) * n for node, n in zip(rows, parts)),
        )
        own = placeholders[: len(stage.parameters)]
        lowered = [node for node in own if stored_dtype(node) != value(node).dtype]
        graded = [node for node in own if value(node).requires_grad]
        return replace(
            held,
            parameters=held.parameters
            + sum(value(node).numel() * stored_dtype(node).itemsize for node in lowered),
            gradients=sum(value(node).numel() * sum_dtype(node).itemsize for node in graded),
        )
