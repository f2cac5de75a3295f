"""What one may ask of a pipeline before any process starts: `autoshard.trace` on a mesh with pp."""

import os
import textwrap
from dataclasses import dataclass

from torch import fx

from autoshard.building.pipeline.program import PipelineProgram
from autoshard.building.pipeline.stage_memory import StageCount
from autoshard.explain import human, pipeline_page, table
from autoshard.memory import StageMemory
from autoshard.planning import Plan
from autoshard.runtime.files import write_whole


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
    def plan(self) -> Plan:
        """The stages and the states of parameters, for a file: `save` it, and give its path as the
        option `plan`."""
        return self.program.saved

    def picture(self) -> str:
        """The schedule as text, where stages take equally long."""
        return self.program.picture()

    def memory(self) -> list[StageMemory]:
        """What a rank holds of each stage in a training step, run operator by operator."""
        chosen = self.program.recomputed
        numbers = range(len(self.program.plan.stages))
        return [StageCount(self.program, number)(chosen.get(number)) for number in numbers]

    def explain(self, width: int = 100) -> str:
        """The stages, what they send and hold, what they wait, and the picture of the schedule.

        width: columns that the parameters of a stage may fill.
        """
        summary, *stages = self._lines()
        lines = [
            summary,
            "",
            table(_HEADER, self._rows(), right=range(1, len(_HEADER))),
            "",
            *textwrap.wrap(_NOTE, 100),
            "",
            *(textwrap.shorten(line, width) for line in stages),
            "",
            self.picture(),
        ]
        return "\n".join(line.rstrip() for line in lines) + "\n"

    def explain_html(self, path: str | os.PathLike[str]) -> None:
        """Write the same as one page that needs no network, with the schedule as the search prices
        it."""
        program, (summary, *stages) = self.program, self._lines()
        spans = program.timeline().spans
        ranks = [
            [(program.name_of(action), *span) for action, span in zip(program.actions(rank), own)]
            for rank, own in enumerate(spans)
        ]
        page = pipeline_page(summary, _HEADER, self._rows(), _NOTE, stages, ranks)
        write_whole(path, page, "page of the plan")

    def _lines(self) -> list[str]:
        first, *stages = self.program.stage_lines()
        sent = human(2 * self.microbatches * sum(self.sent_bytes))
        return [f"{first}; {sent} sent in a step", *stages]

    def _rows(self) -> list[list[str]]:
        plan, ranks = self.program.plan, self.program.ranks
        return [
            [
                f"{number} on rank {number % ranks}",
                str(sum(node.op == "call_function" for node in stage.graph.graph.nodes)),
                f"{1e3 * self.program.stage_seconds(number):.3g}",
                _again(self.program, number),
                human([*plan.sent_bytes, 0][number]),
                human(held.parameters),
                human(held.gradients),
                _kept(held),
                human(held.peak),
            ]
            for number, (stage, held) in enumerate(zip(plan.stages, self.memory()))
        ]


_HEADER = ["stage", "operators", "ms", "again", "sends", "params", "grads", "keeps", "peak"]

_NOTE = (
    "ms: of a micro-batch, forward and backward; again: ms of it that are computed again, under "
    "memory.budget; sends: of a micro-batch, and its gradient comes "
    "back; keeps: micro-batches whose activations are there at once, and of zb1 those of which the "
    "gradients of weights wait; peak: without the optimizer."
)


def _again(program: PipelineProgram, number: int) -> str:
    one = program.recomputed.get(number)
    return f"{1e3 * one.seconds:.3g}" if one else "-"


def _kept(held: StageMemory) -> str:
    late = f", {held.waiting} x {human(held.late)}" if held.late else ""
    return f"{held.live} x {human(held.kept)}{late}"
