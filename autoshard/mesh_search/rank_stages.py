"""What ranks of a pipeline have of its stages, by the estimate of `autoshard plan`: their profiles,
the memory that they take, and what they compute again.

A stage is a run of operators of one planned graph. Equal layers make equal stages, which are asked
once, however many micro-batches they keep.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, TypeVar

from torch import fx

from autoshard.building import Planned
from autoshard.planning import JoinedChoices, Recomputation
from autoshard.planning.cost import Cluster, Link
from autoshard.planning.estimate import (
    Cuts,
    Footprint,
    Frontier,
    Layout,
    Point,
    Profile,
    RankValue,
    SavedForBackward,
    Training,
    Walk,
    footprint,
    waits_of,
)
from autoshard.planning.solver import Chain, cut_stages

U = TypeVar("U", bound=Hashable)


def pass_seconds(
    part: Profile, ranks: Mapping[str, int], links: Mapping[str, Link]
) -> tuple[float, float]:
    """Seconds of a part's forward and backward, with the collectives that are waited for."""
    _, ahead, back = waits_of(part, ranks, links)
    return sum(part.forward) + sum(ahead), sum(part.backward) + sum(back)


def cut_units(
    units: Sequence[U], took: Mapping[U, tuple[float, float]], over: float, stages: int, count: int
) -> list[Sequence[U]] | None:
    """The units of each stage of a pipeline, cut for `count` micro-batches; None: there are fewer.

    took: seconds forward and backward of a unit. over: those of what one sends to the next.
    """
    chain = Chain(
        seconds=[sum(took[unit]) for unit in units],
        sent=[0.0, *[2 * over] * (len(units) - 1), 0.0],
        kept=[0.0] * len(units),
    )
    found = cut_stages(chain, stages, count)
    if found is None:
        return None
    return [units[a:b] for a, b in pairwise([0, *found.cuts, len(units)])]


def joined(parts: Sequence[Profile]) -> Profile:
    """The profile of all stages of a rank, one after the other."""
    if len(parts) == 1:
        return parts[0]
    starts = list(accumulate((len(part.forward) for part in parts), initial=0))
    numbered = list(zip(starts, parts))
    return replace(
        parts[0],
        forward=tuple(each for part in parts for each in part.forward),
        backward=tuple(each for part in parts for each in part.backward),
        sent=tuple(
            s._replace(at=s.at + start, beside=tuple(i + start for i in s.beside))
            for start, part in numbered
            for s in part.sent
        ),
        weights=tuple(
            replace(weight, use=weight.use + start)
            for start, part in numbered
            for weight in part.weights
            if weight.use is not None
        ),
        activations=SavedForBackward(
            saved=sum(part.activations.saved for part in parts),
            transient=max(part.activations.transient for part in parts),
        ),
    )


def stage_footprint(part: Profile, layout: Layout, training: Training) -> Footprint:
    """The memory of a stage: gradients stay whole until the last micro-batch."""
    own = footprint(part, layout, training)
    # gradients of experts that stay are added up over ep at once
    each = (weight.holds(weight.whole(layout), training) for weight in part.weights)
    return replace(own, gradients=sum(one.gradient for one in each))


class StageSpan(NamedTuple):
    """The first operator of a stage, the one behind its last, and how many micro-batches of it are
    kept at once."""

    start: int
    end: int
    live: int


class StageChoices:
    """The choices of the stages of one planned graph, on a rank of an axis of `n`."""

    def __init__(
        self, planned: Planned, n: int, machine: Cluster, training: Training, cuts: Cuts
    ) -> None:
        """cuts: as of `Frontier`."""
        self.planned, self.given, self._cuts = planned, (n, machine, training), cuts
        self.nodes: list[fx.Node] = list(planned.serial.graph.nodes)
        self.regions = any("ac_graph_id" in node.meta for node in self.nodes)
        self._stages: dict[StageSpan, Frontier] = {}
        self._alike: dict[Any, Frontier] = {}

    @cached_property
    def _walk(self) -> Walk:
        return Walk(self.planned.serial, self.planned.decisions, *self.given)

    def choose(
        self, stages: Sequence[StageSpan], room: int, microbatches: int
    ) -> tuple[list[Point], Recomputation] | None:
        """For each of a rank's stages the quickest choice with which they hold at most `room` bytes
        of activations, the least where none does, and all of them of a step. None: there is nothing
        to choose."""
        parts = [self.of(stage) for stage in stages]
        if not all(part.points for part in parts):
            return None
        choices = JoinedChoices(parts)
        index = choices.cheapest(room)
        index = len(choices.steps) - 1 if index is None else index
        points, made = choices.points(index), choices.recomputations(index)
        return points, Recomputation(
            again=frozenset(),
            saved=frozenset(),
            kept=sum(stage.live * one.kept for stage, one in zip(stages, points)),
            spared=sum(stage.live * one.spared for stage, one in zip(stages, made)),
            peak=sum(one.peak for one in points),
            seconds=microbatches * sum(one.seconds for one in points),
            bound=microbatches * sum(one.bound for one in made),
        )

    def of(self, stage: StageSpan) -> Frontier:
        """The choices of a stage."""
        if stage not in self._stages:
            values, several = self._walk.of(self.nodes[stage.start : stage.end]), stage.live > 1
            text = (several, *map(_text, values))
            if text not in self._alike:
                self._alike[text] = Frontier(values, several=several, cuts=self._cuts)
            self._stages[stage] = self._alike[text].keeping(stage.live)
        return self._stages[stage]


def _text(one: RankValue) -> tuple[object, ...]:
    """Equal for values between which nothing tells, but for their names."""
    return (
        *(one.nbytes, one.inner, one.seconds, one.sources, one.needed, one.once, one.held),
        one.again,
    )


class CutLayers(NamedTuple):
    """The layers of each stage; of each rank its profile, and the layers between that it keeps, of
    all micro-batches that are there at once."""

    spans: list[Sequence[int]]
    parts: list[Profile]
    layers: list[int]
