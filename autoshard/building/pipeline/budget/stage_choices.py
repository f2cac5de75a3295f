"""What a rank of a pipeline may keep and compute again in each of its stages: less memory for more
time.

The values of a stage are those of the planned micro-batch that its operators make: what it receives
is kept anyway. Of each it keeps as many micro-batches as the schedule has under way, and computes
again for one at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from torch import fx

from autoshard.building.pipeline.program import PipelineProgram
from autoshard.building.pipeline.stages import BACKWARD
from autoshard.planning import Recomputation, value_text
from autoshard.planning.cost import planned_on
from autoshard.planning.estimate import Frontier, RankValue, Training, Walk
from autoshard.runtime.graph_meta import VALUE
from autoshard.runtime.pipeline import most_kept


class RankChoices:
    """The choices of a rank's stages together, by rising time and falling memory: each gives up
    some bytes in the stage in which they take the least time."""

    def __init__(self, program: PipelineProgram, rank: int) -> None:
        self.numbers = list(range(rank, len(program.plan.stages), program.ranks))
        live = most_kept(program.schedule, program.shape, rank)
        values = stage_values(program, self.numbers)
        self.scales = [
            program.plan.stage_seconds[number]
            / (1 + BACKWARD)
            / max(sum(v.seconds for v in own), 1e-15)
            for number, own in zip(self.numbers, values)
        ]
        """Of seconds as the cut counts them, which knows no efficiencies, to those of values."""
        self.stages = [
            Frontier(own, several=count > 1).keeping(count) for own, count in zip(values, live)
        ]
        self.steps = _steps(self.stages)
        self.estimates = [self._sum(step) for step in self.steps]

    def _sum(self, step: Sequence[int]) -> int:
        chosen = zip(self.stages, step)
        return sum(stage.points[at].peak for stage, at in chosen if stage.points)

    def cheapest(self, peak: int) -> int | None:
        """The index of the quickest step whose estimate is at most `peak` bytes."""
        return next((i for i, one in enumerate(self.estimates) if one <= peak), None)

    def at(self, index: int) -> dict[int, Recomputation]:
        """The choices of a step, by the stage's number."""
        chosen = zip(self.numbers, self.stages, self.steps[index], self.scales)
        found = {
            n: (stage.recomputation(at), scale) for n, stage, at, scale in chosen if stage.points
        }
        return {n: replace(one, seconds=scale * one.seconds) for n, (one, scale) in found.items()}


def stage_values(program: PipelineProgram, numbers: Sequence[int]) -> list[list[RankValue]]:
    """The values that each of some stages makes."""
    planned = program.microbatch.planned
    assert planned is not None  # under a budget
    nodes, decisions, cluster = (
        planned.graph.graph.nodes,
        planned.decisions,
        planned_on(planned.decisions.hardware),
    )
    walk = Walk(planned.graph, decisions, planned.n, cluster, Training())
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


def _steps(stages: Sequence[Frontier]) -> list[tuple[int, ...]]:
    """For each step the point of each stage, from the quickest ones on: the next is the one that
    spares most for its time."""
    at = [0] * len(stages)
    rates = []
    for number, stage in enumerate(stages):
        steepest = float("inf")
        for before, after in pairwise(stage.points):
            rate = (before.peak - after.peak) / max(after.seconds - before.seconds, 1e-15)
            steepest = min(steepest, rate)  # in the order of the points, whatever their rates
            rates.append((-steepest, number))
    found = [tuple(at)]
    for _, number in sorted(rates, key=lambda one: one[0]):
        at[number] += 1
        found.append(tuple(at))
    return found
