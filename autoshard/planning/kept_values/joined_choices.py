"""The choices of several parts of a rank's work together: less memory for more time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from autoshard.planning.estimate import Frontier, Point


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
