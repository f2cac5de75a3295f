"""What parts of a rank's work give up for time: less memory for more seconds.

Where a pipeline is cut is decided before the stages are there to be asked. Layers are alike, so a
stage that keeps a part of its values is taken to compute as large a part of its forward again as
the whole graph does (`part_trade`). Stages of one rank that are there choose together
(`JoinedChoices`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from torch import fx

from autoshard.planning.cost import Cluster
from autoshard.planning.decisions import Decisions, value_text
from autoshard.planning.estimate import Frontier, Point, frontier, segments_of

_MOST_STEPS = 32


class TradeStep(NamedTuple):
    """part: of the bytes that are kept where nothing that takes time is computed again; beside:
    bytes that are there beside those, at the worst moment; seconds: for one of the forward."""

    part: float
    beside: float
    seconds: float


@dataclass(frozen=True)
class PartTrade:
    """kept: bytes of each value, by `value_text`, where nothing that takes time is computed again.
    steps: by rising seconds."""

    kept: dict[str, int]
    steps: tuple[TradeStep, ...]


def part_trade(gm: fx.GraphModule, decisions: Decisions, n: int, cluster: Cluster) -> PartTrade:
    """What a planned graph gives up on a rank of an axis of `n`. Of its last segment nothing: that
    is the loss, which one stage has."""
    choices = frontier(gm, decisions, n, cluster)
    values, points = choices.values, choices.points
    if not points:
        return PartTrade({}, ())
    kept = {value_text(one.key): nbytes for one, nbytes, _ in choices.kept_at(0)}
    segments = segments_of(values)
    last = sum(kept[value_text(v.key)] for v, s in zip(values, segments) if s == segments[-1])
    forward, most = sum(one.seconds for one in values), points[0].kept - last
    if forward <= 0 or most <= 0:
        return PartTrade(kept, ())
    few = points[1 :: max(1, len(points) // _MOST_STEPS)]
    return PartTrade(
        kept,
        tuple(
            TradeStep((one.kept - last) / most, one.peak - one.kept, one.seconds / forward)
            for one in [*few, *points[-1:]]
        ),
    )


class JoinedChoices:
    """Parts of which each has choices of its own, by rising time and falling memory of all.

    steps: for each, the point of each part; from one to the next the part changes that spares most
    bytes for its time. estimates: bytes of each step.
    """

    def __init__(self, parts: Sequence[Frontier]) -> None:
        self.parts = [part for part in parts if part.points]
        self.steps = _steps(self.parts)
        self.estimates = [sum(one.peak for one in self.points(i)) for i in range(len(self.steps))]

    def points(self, index: int) -> list[Point]:
        """The points of a step."""
        return [part.points[at] for part, at in zip(self.parts, self.steps[index])]

    def cheapest(self, peak: int) -> int | None:
        """The index of the quickest step whose estimate is at most `peak` bytes; None: there is
        none. Of those that take as long, the smallest."""
        found = next((i for i, one in enumerate(self.estimates) if one <= peak), None)
        if found is not None and len(self.parts) == 1:
            return self.parts[0].cheapest(peak)
        return found


def _steps(parts: Sequence[Frontier]) -> list[tuple[int, ...]]:
    at, rates = [0] * len(parts), list[tuple[float, int]]()
    for number, part in enumerate(parts):
        steepest = float("inf")
        for before, after in pairwise(part.points):
            rate = (before.peak - after.peak) / max(after.seconds - before.seconds, 1e-15)
            steepest = min(steepest, rate)  # points follow each other, whatever their rates
            rates.append((-steepest, number))
    found = [tuple(at)]
    for _, number in sorted(rates, key=lambda one: one[0]):
        at[number] += 1
        found.append(tuple(at))
    return found
