"""The choices of recomputation worth having: less memory for more time, from none to the least.

For each length of segments and each price on a kept byte the choice is exact. Equal layers change
their choice at the same price, so between two neighbouring prices the first segments take the
choice of the dearer one: what the first layers keep is there longest. Lengths are doubled from half
a layer, as the segments have it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch import fx

from autoshard.planning.cost import Cluster
from autoshard.planning.decisions import Decisions, Recomputation, value_text
from autoshard.planning.estimate.recomputable import RankValue, values_of
from autoshard.planning.estimate.recomputation import Choices, Fate
from autoshard.planning.estimate.segments import merged, segments_of
from autoshard.planning.estimate.training import Training

#: Seconds a kept byte. At the lowest only what costs nothing is computed again, at the highest a
#: gigabyte costs a thousand seconds.
_PRICES = (1e-16, *(10 ** (exponent / 4) for exponent in range(-56, -23)), 1e-6)
_LONGEST = 16


@dataclass(frozen=True)
class Point:
    """One choice: bytes at its worst moment, and the seconds it takes again.

    which: index of the choices that the segments from `border` on have; those before have those of
    the next price.
    """

    peak: int
    seconds: float
    kept: int
    length: int
    which: int
    border: int


class Frontier:
    """The choices of one planned graph on a rank, by rising time and falling memory."""

    def __init__(self, values: Sequence[RankValue]) -> None:
        self.values = values
        self._lengths: list[_Length] = []
        points: list[Point] = []
        segments = segments_of(values)
        length = 1
        while length <= _LONGEST and values:
            one = _Length(values, merged(segments, length))
            if length > 1 and one.count <= 2:
                break
            self._lengths.append(one)
            points += one.points(len(self._lengths) - 1)
            length *= 2
        self.points = _undominated(points)

    def cheapest(self, peak: int) -> int | None:
        """The index of the quickest choice that holds at most `peak` bytes; None: there is none.

        Of those that take as long, but for the rounding of sums, the smallest.
        """
        found = next((i for i, one in enumerate(self.points) if one.peak <= peak), None)
        if found is not None:
            most = self.points[found].seconds * (1 + 1e-9)
            while found + 1 < len(self.points) and self.points[found + 1].seconds <= most:
                found += 1
        return found

    def recomputation(self, index: int) -> Recomputation:
        """The choice at a point."""
        point = self.points[index]
        length = self._lengths[point.length]
        fates = length.fates(point)
        keys: dict[Fate, list[RankValue]] = {fate: [] for fate in Fate}
        for one, fate in zip(self.values, fates):
            keys[fate].append(one)
        bound = min(one.bound(point.kept) for one in self._lengths)
        again = [one.key for one in keys[Fate.AGAIN]]
        views = [key for one in keys[Fate.AGAIN] for key in one.views]
        return Recomputation(
            again=frozenset(map(value_text, [*again, *views])),
            saved=frozenset(value_text(one.key) for one in keys[Fate.KEPT]),
            kept=point.kept,
            spared=max(0, self.points[0].kept - point.kept),
            peak=point.peak,
            seconds=point.seconds,
            bound=min(bound, point.seconds),
        )


def frontier(
    gm: fx.GraphModule,
    decisions: Decisions,
    n: int,
    cluster: Cluster,
    training: Training | None = None,
) -> Frontier:
    """The choices that a planned graph leaves on a rank of an axis of `n`."""
    return Frontier(values_of(gm, decisions, n, cluster, training or Training()))


class _Sums:
    """Bytes kept, bytes computed again and seconds of each segment under one price."""

    def __init__(self, choices: Choices, count: int, price: float) -> None:
        self.price = price
        self.fates = choices.fates(price, _PRICES[0])
        self.kept, self.again, self.seconds = [0] * count, [0] * count, [0.0] * count
        for one, segment, fate in zip(choices.values, choices.segments, self.fates):
            if fate is Fate.KEPT:
                self.kept[segment] += one.nbytes
            if fate is Fate.AGAIN:
                self.again[segment] += one.nbytes * one.held + one.inner
                self.seconds[segment] += one.seconds
            else:
                self.kept[segment] += one.inner
        self.total = (sum(self.kept), sum(self.seconds))


class _Length:
    """Segments of one length, under each price under which something changes."""

    def __init__(self, values: Sequence[RankValue], segments: Sequence[int]) -> None:
        self.count = segments[-1] + 1
        self.choices = Choices(values, segments)
        self.sums: list[_Sums] = []
        for price in _PRICES:
            one = _Sums(self.choices, self.count, price)
            if not self.sums or one.fates != self.sums[-1].fates:
                self.sums.append(one)

    def fates(self, point: Point) -> list[Fate]:
        """The fate of each value at a point of this length."""
        after = self.sums[point.which].fates
        if not point.border:
            return after
        before = self.sums[point.which + 1].fates
        segments = self.choices.segments
        return [b if s < point.border else a for a, b, s in zip(after, before, segments)]

    def points(self, length: int) -> Iterator[Point]:
        """A point for each price, and for each border between two."""
        for which, one in enumerate(self.sums):
            cheap = list(accumulate(one.kept))
            # by segment: the most from there on, above what is kept before it
            rest = [0] * (self.count + 1)
            for k in range(self.count - 1, -1, -1):
                rest[k] = max(cheap[k] + one.again[k], rest[k + 1])
            last = which + 1 == len(self.sums)
            dear = one if last else self.sums[which + 1]
            kept, most, seconds = 0, 0, sum(one.seconds)
            for border in range(1 if last else self.count):
                if border:
                    k = border - 1
                    kept += dear.kept[k]
                    most = max(most, kept + dear.again[k])
                    seconds += dear.seconds[k] - one.seconds[k]
                before = cheap[border - 1] if border else 0
                peak = max(most, rest[border] - before + kept)
                total = kept + cheap[-1] - before
                yield Point(peak, seconds, total, length, which, border)

    def bound(self, kept: int) -> float:
        """The least seconds of any choice that keeps at most `kept` bytes: the best of the bounds
        that the prices give."""
        return max(one.total[1] + one.price * (one.total[0] - kept) for one in self.sums)


def _undominated(points: Sequence[Point]) -> list[Point]:
    """Those that no other is quicker and smaller than, by rising seconds."""
    found: list[Point] = []
    for one in sorted(points, key=lambda one: (one.seconds, one.peak, one.length, one.border)):
        if not found or one.peak < found[-1].peak:
            found.append(one)
    return found
