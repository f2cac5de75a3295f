"""What the stages of a pipeline compute again, by the estimate of `autoshard plan`.

A stage is a run of operators of one planned graph. Equal layers make equal stages, which are asked
once, however many micro-batches they keep.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

from torch import fx

from autoshard.building import Planned
from autoshard.planning import JoinedChoices, Recomputation
from autoshard.planning.cost import Cluster
from autoshard.planning.estimate import Cuts, Frontier, Point, RankValue, Training, Walk


class StageSpan(NamedTuple):
    """The first operator of a stage, the one behind its last, and how many micro-batches of it are
    kept at once."""

    start: int
    end: int
    live: int


class StageChoices:
    """The choices of the stages of one planned graph, on a rank of an axis of `n`."""

    def __init__(self, planned: Planned, n: int, machine: Cluster, training: Training) -> None:
        self.planned, self.given = planned, (n, machine, training)
        self.nodes: list[fx.Node] = list(planned.serial.graph.nodes)
        self.regions = any("ac_graph_id" in node.meta for node in self.nodes)
        self._cuts: Cuts = {}
        self._spans: dict[tuple[int, int, bool], Frontier] = {}
        self._alike: dict[Any, Frontier] = {}
        self._keeping: dict[tuple[int, int], Frontier] = {}

    @cached_property
    def _walk(self) -> Walk:
        return Walk(self.planned.serial, self.planned.decisions, *self.given)

    def choose(
        self, stages: Sequence[StageSpan], room: int, microbatches: int
    ) -> tuple[list[Point], Recomputation] | None:
        """For each of a rank's stages the quickest choice with which they hold at most `room` bytes
        of activations, the least where none does, and all of them of a step. None: there is nothing
        to choose."""
        parts = [self._of(stage) for stage in stages]
        if not all(part.points for part in parts):
            return None
        joined = JoinedChoices(parts)
        index = joined.cheapest(room)
        at = joined.steps[-1 if index is None else index]
        points = [part.points[i] for part, i in zip(parts, at)]
        made = [part.recomputation(i) for part, i in zip(parts, at)]
        return points, Recomputation(
            again=frozenset(),
            saved=frozenset(),
            kept=sum(stage.live * one.kept for stage, one in zip(stages, points)),
            spared=sum(stage.live * one.spared for stage, one in zip(stages, made)),
            peak=sum(one.peak for one in points),
            seconds=microbatches * sum(one.seconds for one in points),
            bound=microbatches * sum(one.bound for one in made),
        )

    def _of(self, stage: StageSpan) -> Frontier:
        several = stage.live > 1
        key = (stage.start, stage.end, several)
        if key not in self._spans:
            values = self._walk.of(self.nodes[stage.start : stage.end])
            text = (several, *map(_text, values))
            if text not in self._alike:
                self._alike[text] = Frontier(values, several=several, cuts=self._cuts)
            self._spans[key] = self._alike[text]
        found = self._spans[key]
        of = (id(found), stage.live)
        if of not in self._keeping:
            self._keeping[of] = found.keeping(stage.live)
        return self._keeping[of]


def _text(one: RankValue) -> tuple[object, ...]:
    """Equal for values between which nothing tells, but for their names."""
    return (
        *(one.nbytes, one.inner, one.seconds, one.sources, one.needed, one.once, one.held),
        one.again,
    )
