"""The choices of what is kept that are worth having: less memory for more time, down to the least.

For each length of segments, each price on a kept byte and each charge for a transfer to the host
the choice is exact. Equal layers change their choice at the same price, so between two neighbouring
prices the first segments take the choice of the dearer one: what the first layers keep is there
longest. Lengths are doubled from half a layer, as the segments have it.

Transfers run beside the compute of their segment, forward and backward. What is longer than that is
waited for; what is hidden takes only its share of the device's memory bandwidth. So a second on the
way to the host is worth next to nothing, a second or two, and the charges between those say what
goes there while there is room beside the compute: what takes most time to compute again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np
from torch import fx

from autoshard.planning.cost import Cluster
from autoshard.planning.decisions import Decisions, Recomputation, value_text
from autoshard.planning.estimate.recomputable import (
    LEAST_PRICE,
    RankValue,
    Walk,
    takes_no_time,
)
from autoshard.planning.estimate.recomputation import (
    Choices,
    Cuts,
    Fate,
    as_fates,
    merged,
    segments_of,
)
from autoshard.planning.estimate.weights import Training
from autoshard.runtime.errors import ConfigError

#: Seconds a kept byte. At the lowest only what costs nothing is computed again, at the highest a
#: gigabyte costs a thousand seconds.
_PRICES = (LEAST_PRICE, *(10 ** (exponent / 4) for exponent in range(-56, -23)), 1e-6)
#: Seconds waited for one of a transfer: 0 where compute hides it, 2 where it is waited for twice.
_CHARGES = (0.0, 0.03, 0.1, 0.3, 1.0, 2.0)
#: Seconds that compute takes longer for one of a transfer there and back, which uses its memory.
SLOWS = 0.04
_LONGEST = 16


@dataclass(frozen=True)
class Point:
    """One choice: bytes at its worst moment, and the seconds that it takes more.

    kept, host: bytes that are kept, on the device and on the host. which: index of the choices that
    the segments from `border` on have; those before have those of the next price.
    """

    peak: int
    seconds: float
    kept: int
    host: int
    length: int
    which: int
    border: int


class Frontier:
    """The choices of one planned graph on a rank, by rising time and falling memory.

    host_memory: bytes that may be kept on the host. cuts: those of other plans of the graph, which
    are added to. several: whether several micro-batches are kept at once, as beside pp: then the
    last segment is as the others.
    """

    def __init__(
        self,
        values: Sequence[RankValue],
        host_memory: int = 0,
        cuts: Cuts | None = None,
        several: bool = False,
    ) -> None:
        cuts = {} if cuts is None else cuts
        segments = segments_of(values)
        self.values = list(values) if several else kept_in_the_last(values, segments)
        self.host_memory, values = host_memory, self.values
        self._lengths: list[_Length] = []
        length = 1
        while length <= _LONGEST and values:
            choices = Choices(values, merged(segments, length), cuts)
            if length > 1 and choices.count <= 2:
                break
            for charge in (math.inf, *(_CHARGES if host_memory else ())):
                self._lengths.append(_Length(choices, charge, several))
            length *= 2

    @cached_property
    def _every(self) -> list[Point]:
        found = (point for at, one in enumerate(self._lengths) for point in one.points(at))
        return [point for point in found if point.host <= self.host_memory]

    @cached_property
    def points(self) -> list[Point]:
        """The choices; the first without anything on the host."""
        return _undominated(self._every)

    @cached_property
    def free(self) -> Point:
        """The quickest, for which no other is made; all zeros where there is nothing to choose."""
        first = (one.free(at) for at, one in enumerate(self._lengths))
        return min(first, key=_order, default=Point(0, 0.0, 0, 0, 0, 0, 0))

    @property
    def estimates(self) -> list[int]:
        """Bytes of each choice."""
        return [one.peak for one in self.points]

    def keeping(self, count: int) -> Frontier:
        """The choices where `count` micro-batches are kept while one of them is differentiated."""
        found = copy(self)
        found.points = _undominated(
            [replace(one, peak=one.peak + (count - 1) * one.kept) for one in self._every]
        )
        return found

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

    def kept(self) -> Iterator[tuple[RankValue, int, int]]:
        """Each value with its bytes that are kept for the backward by the quickest choice, and the
        bytes that are computed again there."""
        fates = self._lengths[self.free.length].fates(self.free) if self.values else []
        for one, fate in zip(self.values, fates):
            if fate is Fate.AGAIN:
                yield one, 0, one.nbytes * one.held + one.inner
            else:
                yield one, one.nbytes * (fate is Fate.KEPT) + one.inner, 0

    def recomputation(self, index: int) -> Recomputation:
        """The choice at a point."""
        point = self.points[index]
        length = self._lengths[point.length]
        fates = length.fates(point)
        keys: dict[Fate, list[RankValue]] = {fate: [] for fate in Fate}
        for value, fate in zip(self.values, fates):
            keys[fate].append(value)
        most: dict[int, float] = {}
        for one in self._lengths:
            of = id(one.choices)
            most[of] = max(most.get(of, 0.0), one.bound(point.kept, self.host_memory > 0))
        bound = min(most.values())
        again = [one.key for one in keys[Fate.AGAIN]]
        views = [key for one in keys[Fate.AGAIN] for key in one.views]
        return Recomputation(
            again=frozenset(map(value_text, [*again, *views])),
            saved=frozenset(value_text(one.key) for one in keys[Fate.KEPT]),
            sent=frozenset(value_text(one.key) for one in keys[Fate.HOST]),
            kept=point.kept,
            spared=max(0, self.free.kept - point.kept),
            peak=point.peak,
            seconds=point.seconds,
            bound=min(bound, point.seconds),
            host=point.host,
            transfers=2 * sum(one.transfer for one in keys[Fate.HOST]),
        )


def frontier(
    gm: fx.GraphModule,
    decisions: Decisions,
    n: int,
    cluster: Cluster,
    training: Training | None = None,
    host_memory: int | None = None,
    cuts: Cuts | None = None,
) -> Frontier:
    """The choices that a planned graph leaves on a rank of an axis of `n`.

    host_memory: bytes of its host that the rank may keep values in; None: it keeps none there.
    cuts: as of `Frontier`.
    Raises ConfigError where it may and the cluster does not say how fast the host is reached.
    """
    if host_memory and cluster.device.host is None:
        raise ConfigError(
            f"host={host_memory:,} of the option memory lets values wait on the host, and the "
            f"description of {cluster.name} does not say how fast that is reached",
            remedy="Add host: {microseconds: 10, gigabytes_per_second: 64} to its file, with "
            "the figures of your machine, or leave host out.",
        )
    values = Walk(gm, decisions, n, cluster, training or Training()).run()
    return Frontier(values, host_memory or 0, cuts)


def kept_in_the_last(values: Sequence[RankValue], segments: Sequence[int]) -> list[RankValue]:
    """The values, of which those in the last segment are made once if they take time: all of that
    segment is needed at once."""
    return [
        one
        if segment != segments[-1] or takes_no_time(one.seconds, one.nbytes)
        else replace(one, once=True)
        for one, segment in zip(values, segments)
    ]


class _Sums:
    """Bytes and seconds of each segment under one price and one charge. last: the price in the last
    one.

    kept, sent: bytes on the device and to the host. again: there only while backward is in the
    segment. seconds: of what is computed again, and of transfers that outlast the compute.
    """

    def __init__(self, choices: Choices, price: float, last: float, charge: float) -> None:
        self.price = price
        self.fates = fates = choices.fates(price, last, charge + SLOWS)
        again, sent = fates == Fate.AGAIN, fates == Fate.HOST
        size, inner = choices.sizes, choices.inner
        self.kept = choices.bytes_by_segment(np.where(fates == Fate.KEPT, size, 0) + inner * ~again)
        self.again = choices.bytes_by_segment(choices.made * again + size * sent)
        self.sent = choices.bytes_by_segment(size * sent)
        repeated = choices.by_segment(np.where(again, choices.seconds, 0.0))
        transfers = choices.by_segment(np.where(sent, choices.transfers, 0.0))
        self.seconds = [
            again
            + SLOWS * moved
            + max(0.0, moved - compute)
            + max(0.0, moved - 2 * compute - again)
            for again, moved, compute in zip(repeated, transfers, choices.compute)
        ]
        # a wait is at least the charge's part, up to 1, of what the compute does not hide
        wait = 0.0 if math.isinf(charge) else charge * (sum(transfers) - sum(choices.compute))
        self.total = (sum(self.kept), sum(repeated) + SLOWS * sum(transfers) + wait)


class _Length:
    """Segments of one length and one charge, under each price under which something changes."""

    def __init__(self, choices: Choices, charge: float, several: bool) -> None:
        self.choices, self.charge, self.several = choices, charge, several

    def at(self, price: int) -> _Sums:
        """The sums at the price of this number."""
        last = _PRICES[price if self.several else 0]
        return _Sums(self.choices, _PRICES[price], last, self.charge)

    @cached_property
    def first(self) -> _Sums:
        """The sums at the lowest price."""
        return self.at(0)

    @cached_property
    def sums(self) -> list[_Sums]:
        """Those of each price. Of a range at whose ends the fates are the same, those at one."""
        last = len(_PRICES) - 1
        found, ranges = {0: self.first, last: self.at(last)}, [(0, last)]
        while ranges:
            low, high = ranges.pop()
            if high - low > 1 and not np.array_equal(found[low].fates, found[high].fates):
                middle = (low + high) // 2
                found[middle] = self.at(middle)
                ranges += [(low, middle), (middle, high)]
        rest = pairwise(found[at] for at in sorted(found))
        return [self.first, *(b for a, b in rest if not np.array_equal(a.fates, b.fates))]

    def fates(self, point: Point) -> list[Fate]:
        """The fate of each value at a point of this length."""
        found = self.sums[point.which].fates if point.which else self.first.fates
        if point.border:
            before = self.sums[point.which + 1].fates
            found = np.where(self.choices.places < point.border, before, found)
        return as_fates(found)

    def free(self, length: int) -> Point:
        """The point at the lowest price."""
        one = self.first
        peak = max(map(sum, zip(accumulate(one.kept), one.again)))
        return Point(peak, sum(one.seconds), sum(one.kept), sum(one.sent), length, 0, 0)

    def points(self, length: int) -> Iterator[Point]:
        """A point for each price, and for each border between two."""
        count = self.choices.count
        for which, one in enumerate(self.sums):
            last = which + 1 == len(self.sums)
            dear = one if last else self.sums[which + 1]
            cheap, kept = ([0, *accumulate(each.kept)] for each in (one, dear))
            away, sent = ([0, *accumulate(each.sent)] for each in (one, dear))
            # the most of the segments before each, and from there on, above what is kept before
            most = [0, *accumulate(map(sum, zip(kept[1:], dear.again)), max)]
            ahead = list(map(sum, zip(cheap[1:], one.again)))[::-1]
            rest = [0, *accumulate(ahead, max)][::-1]
            more = (b - a for a, b in zip(one.seconds, dear.seconds))
            seconds = accumulate(more, initial=sum(one.seconds))
            for border, took in zip(range(1 if last else count), seconds):
                before = kept[border] - cheap[border]
                peak = max(most[border], rest[border] + before)
                host = sent[border] + away[-1] - away[border]
                yield Point(peak, took, cheap[-1] + before, host, length, which, border)

    def bound(self, kept: int, host: bool) -> float:
        """The least seconds of any choice that keeps at most `kept` bytes: the best of the bounds
        that the prices give. host: whether something may go there. A charge above 1 bounds
        nothing."""
        if host and self.charge > 1:
            return 0.0
        return max(one.total[1] + one.price * (one.total[0] - kept) for one in self.sums)


def _undominated(points: Sequence[Point]) -> list[Point]:
    """Those that no other is quicker and smaller than, by rising seconds."""
    found: list[Point] = []
    for one in sorted(points, key=_order):
        if not found or one.peak < found[-1].peak:
            found.append(one)
    return found


def _order(one: Point) -> tuple[float, int, int, int, int]:
    return one.seconds, one.peak, one.host, one.length, one.border
