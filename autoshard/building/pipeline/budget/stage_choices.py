"""What a rank of a pipeline may keep and compute again in each of its stages: less memory for more
time.

The values of a stage are those of the planned micro-batch that its operators make: what it receives
is kept anyway. Of each it keeps as many micro-batches as the schedule has under way, and computes
again for one at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import fx

from autoshard.building.pipeline.program import PipelineProgram
from autoshard.building.pipeline.stages import BACKWARD
from autoshard.planning import JoinedChoices, Recomputation, value_text
from autoshard.planning.estimate import Frontier, RankValue, Training, Walk
from autoshard.runtime.graph_meta import VALUE
from autoshard.runtime.pipeline import most_kept


class RankChoices(JoinedChoices):
    """The choices of a rank's stages together."""

    def __init__(self, program: PipelineProgram, rank: int) -> None:
        numbers = range(rank, len(program.plan.stages), program.ranks)
        live = most_kept(program.schedule, program.shape, rank)
        values = stage_values(program, numbers)
        parts = [
            Frontier(own, several=count > 1).keeping(count) for own, count in zip(values, live)
        ]
        super().__init__(parts)
        self.numbers = [number for number, part in zip(numbers, parts) if part.points]
        # the cut counts operators without the efficiencies by which those of values are priced
        forward = {n: sum(v.seconds for v in own) for n, own in zip(numbers, values)}
        own_seconds = program.plan.stage_seconds
        self.scales = [own_seconds[n] / (1 + BACKWARD) / (forward[n] or 1.0) for n in self.numbers]

    def at(self, index: int) -> dict[int, Recomputation]:
        """The choices of a step, by the stage's number, with seconds as those of stages."""
        made = [part.recomputation(at) for part, at in zip(self.parts, self.steps[index])]
        chosen = zip(self.numbers, made, self.scales)
        return {n: replace(one, seconds=scale * one.seconds) for n, one, scale in chosen}


def stage_values(program: PipelineProgram, numbers: Sequence[int]) -> list[list[RankValue]]:
    """The values that each of some stages makes."""
    planned = program.microbatch.planned
    assert planned is not None  # under a budget
    nodes, decisions = planned.graph.graph.nodes, planned.decisions
    walk = Walk(planned.graph, decisions, planned.n, decisions.machine, Training())
    found = []
    for number in numbers:
        graph = program.plan.stages[number].graph.graph
        texts = {text for node in graph.nodes if (text := _text(node))}
        names = {text.partition(" ")[0] for text in texts}
        made = walk.of(node for node in nodes if node.name in names)
        found.append(_only(made, [value_text(one.key) in texts for one in made]))
    return found


def _only(values: Sequence[RankValue], inside: Sequence[bool]) -> list[RankValue]:
    """Some of the values: a change of state may lie on the other side of a cut."""
    places = {i: place for place, i in enumerate(i for i, own in enumerate(inside) if own)}
    return [
        replace(values[i], sources=tuple(places[s] for s in values[i].sources if s in places))
        for i in places
    ]


def _text(node: fx.Node) -> str:
    return str(node.meta.get("custom", {}).get(VALUE, ""))
