"""What to keep, send to the host or compute again, exactly, for one price of a kept byte.

A value is kept, on the device or on the host, computed again, or not needed in backward. What is
computed again takes the time of its operator (of its collective, where it is a change of state),
and what that reads must be there too: kept, or computed again itself. To keep a value costs the
cheaper of its bytes, at the price, and of its way to the host, at the charge for a second of that.
The cheapest choice is a minimum cut. Each value is a pair of vertices, "computed" and "there";
those on the sink's side are computed, and there, in backward:

    source -> computed      its seconds
    computed -> there       its bytes, at the price, or its transfer, at the charge
    computed -> sink        bytes that the operator keeps of its own, at the price
    there -> computed       of each value that reads it: may not be cut
    there -> sink           of what a derivative reads: may not be cut

It is the cut of torch's partitioner ("Min-cut optimal(*) recomputation with AOTAutograd", H. He and
S. Zhang, 2022) with seconds in the place of bans. Equal layers are solved once.

Segments of a forward pass: no value is computed again across the border of two.

Were chains of recomputation free to be as long as they like, keeping nothing would cost one more
forward pass at most, and gain nothing: at its end all is there that was not to be kept. Within a
segment (a layer, or half of one) what is computed again is gone before the segment before it needs
the room. Borders lie where little crosses: between two peaks of the bytes that are alive, each at
least twice what is alive at the border; none lies inside a region of the user's.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from autoshard.planning.estimate.recomputable import RankValue
from autoshard.planning.solver import UNCUT, minimum_cut

_PROMINENCE = 2
_NEIGHBOURS = 3
"""In so many segments a value is read that layers hand on."""


def segments_of(values: Sequence[RankValue]) -> list[int]:
    """The number of the segment of each value, from 0, in order."""
    alive = _alive(values)
    borders: list[int] = []
    lowest, highest, falls = 0, 0, False
    for i, size in enumerate(alive):
        if falls:
            if size < alive[lowest]:
                lowest = i
            if size >= _PROMINENCE * alive[lowest] and size:
                borders.append(lowest)
                highest, falls = i, False
        else:
            if size > alive[highest]:
                highest = i
            if alive[highest] and size * _PROMINENCE <= alive[highest]:
                lowest, falls = i, True
    inside = _inside_regions(values)
    borders = [border for border in borders if border not in inside]
    return [bisect_right(borders, i) for i in range(len(values))]


def merged(segments: Sequence[int], count: int) -> list[int]:
    """Segments with `count` neighbours as one each; the last stays alone.

    In the last nothing is computed again, whatever its size: all of it is needed at once.
    """
    last = segments[-1] if segments else 0
    joined = [segment // count for segment in segments]
    after = max((one for one, own in zip(joined, segments) if own != last), default=-1) + 1
    return [after if own == last else one for one, own in zip(joined, segments)]


def _inside_regions(values: Sequence[RankValue]) -> set[int]:
    """The positions in the user's regions of activation checkpointing, but the first of each."""
    ends: dict[int, tuple[int, int]] = {}
    for i, one in enumerate(values):
        if one.again >= 0:
            ends[one.again] = (ends.get(one.again, (i, i))[0], i)
    return {i for first, last in ends.values() for i in range(first + 1, last + 1)}


def _alive(values: Sequence[RankValue]) -> list[int]:
    """Bytes that cross to each value from those before it, to be read there or later."""
    change = [0] * (len(values) + 1)
    last = [-1] * len(values)
    for i, one in enumerate(values):
        for source in one.sources:
            last[source] = i
    for i, one in enumerate(values):
        if last[i] > i:
            change[i + 1] += one.nbytes
            change[last[i] + 1] -= one.nbytes
    return list(accumulate(change[:-1]))


#: Femtoseconds, in which costs are whole numbers: sums do not depend on the order of additions.
_UNIT = 1e15


class Fate(IntEnum):
    """The fate of a value in backward: nobody reads it, it is kept, computed again, or kept in the
    memory of the host."""

    UNREAD = 0
    KEPT = 1
    AGAIN = 2
    HOST = 3


Fates = NDArray[np.int8]
_EACH = tuple(Fate)


def as_fates(numbers: Fates) -> list[Fate]:
    return [_EACH[number] for number in numbers.tolist()]


CutKey = tuple[tuple[object, ...], ...]
"""What the cut of values depends on, in order: equal in equal layers."""


class Cut:
    """The cheapest choices of values that are decided together, by price and charge. fates: by
    charge, those of the prices that were solved, rising."""

    def __init__(self) -> None:
        self.fates: dict[float, tuple[list[float], list[Fates]]] = {}

    def known(self, price: float, charge: float) -> Fates | None:
        """The fates at a price: those solved there, or on both sides of it, if they are the same.
        A choice costs its seconds and its bytes at their price: the cheapest at two prices is the
        cheapest between."""
        prices, found = self.fates.setdefault(charge, ([], []))
        at = bisect_left(prices, price)
        if at == len(prices):
            return None
        if prices[at] == price or (at and np.array_equal(found[at - 1], found[at])):
            return found[at]
        return None

    def add(self, price: float, charge: float, fates: Fates) -> None:
        prices, found = self.fates[charge]
        at = bisect_left(prices, price)
        prices.insert(at, price)
        found.insert(at, fates)


Cuts = dict[CutKey, Cut]


@dataclass(frozen=True)
class _Part:
    """Values that are decided together, and by one cut. members: those in the cut, where one stands
    for all that are alike; times: how many it stands for. values: positions of all; which: the
    member that stands for each. ends: whether they are in the last segment."""

    members: list[int]
    times: list[int]
    values: NDArray[np.intp]
    which: NDArray[np.intp]
    ends: bool
    cut: Cut


class Choices:
    """The choices that values in segments leave, for any price.

    Values that cross a border are not computed again. known: the cuts of parts, which other choices
    may share, and add to.
    """

    def __init__(
        self, values: Sequence[RankValue], segments: Sequence[int], known: Cuts | None = None
    ) -> None:
        self.values, self.segments = values, segments
        self.count = segments[-1] + 1 if segments else 0
        self.crosses = _crossing(values, segments)
        self.places = np.array(segments, np.intp)
        self.sizes = np.array([one.nbytes for one in values], float)
        self.inner = np.array([one.inner for one in values], float)
        self.made = self.sizes * [one.held for one in values] + self.inner
        """Bytes that are there where a value is computed again."""
        self.seconds = np.array([one.seconds for one in values], float)
        self.compute = self.by_segment(self.seconds)
        """By segment: seconds of its forward, beside which transfers run."""
        self.transfers = np.array([one.transfer for one in values], float)
        fixed = [one.needed and self._stays(i) for i, one in enumerate(values)]
        self._fixed = np.array(fixed, bool)
        self._at_end = self.places == self.count - 1
        self.parts = self._parts(fixed, {} if known is None else known)

    def fates(self, price: float, last: float, charge: float) -> Fates:
        """The fate of each value, at `price` seconds a kept byte; `last`: in the last segment, of
        which nothing goes to the host. charge: seconds for one of a transfer; infinite: none is."""
        found = np.full(len(self.values), Fate.UNREAD, np.int8)
        found[self._fixed] = Fate.KEPT
        if not math.isinf(charge):
            with np.errstate(invalid="ignore"):  # what cannot be sent, at no charge
                cheaper = self.transfers * charge < self.sizes * price
            found[self._fixed & cheaper & ~self._at_end] = Fate.HOST
        for part in self.parts:
            here, own = (last, math.inf) if part.ends else (price, charge)
            fates = part.cut.known(here, own)
            if fates is None:
                fates = self._cut(part, here, own)
                part.cut.add(here, own, fates)
            found[part.values] = fates[part.which]
        return found

    def by_segment(self, each: NDArray[np.float64]) -> list[float]:
        """The sum of a number of each value, by segment."""
        sums: list[float] = np.bincount(self.places, each, self.count).tolist()
        return sums

    def bytes_by_segment(self, each: NDArray[np.float64]) -> list[int]:
        """The sum of bytes of each value, by segment."""
        return list(map(int, self.by_segment(each)))

    def _stays(self, i: int) -> bool:
        """Whether a value cannot be computed again."""
        return self.values[i].once or self.crosses[i]

    def _parts(self, fixed: Sequence[bool], known: Cuts) -> list[_Part]:
        """The values that are not `fixed`, by what decides together.

        A hub, such as a table of positions that all layers read, joins its readers to one part.
        What it joins and is equal otherwise has the same fates, as the cut with the fewest vertices
        is the only one of them: no exchange of equal ones may change it. So one of each is in the
        cut, with the costs of all; else the cut is as large as the model is deep.
        """
        free = [i for i in range(len(self.values)) if not fixed[i]]
        root = list(range(len(self.values)))
        reads = [
            (i, source)
            for i in free
            if not self._stays(i)
            for source in self.values[i].sources
            if not fixed[source]
        ]
        hubs = self._hubs(reads)
        for i, source in reads:
            if source not in hubs:
                _join(root, i, source)
        joined: dict[int, list[int]] = {}
        for i in free:
            if i not in hubs:
                joined.setdefault(_find(root, i), []).append(i)
        for i, source in reads:
            _join(root, i, source)
        parts: dict[int, tuple[list[int], list[list[int]]]] = {}
        for hub in hubs:
            parts.setdefault(_find(root, hub), ([], []))[0].append(hub)
        for each in joined.values():
            parts.setdefault(_find(root, each[0]), ([], []))[1].append(each)
        alike: dict[tuple[CutKey, bool], list[_Part]] = {}
        for of_hubs, others in parts.values():
            part, shape = self._part(of_hubs, others, known)
            alike.setdefault((shape, part.ends), []).append(part)
        return [
            replace(
                some[0],
                values=np.concatenate([one.values for one in some]),
                which=np.concatenate([one.which for one in some]),
            )
            for some in alike.values()
        ]

    def _hubs(self, reads: Sequence[tuple[int, int]]) -> list[int]:
        """The values that stay and are read in more segments than neighbours. reads: (by, what)."""
        segments: dict[int, set[int]] = {}
        for i, source in reads:
            if self._stays(source):
                segments.setdefault(source, set()).add(self.segments[i])
        return sorted(i for i, some in segments.items() if len(some) > _NEIGHBOURS)

    def _part(
        self, hubs: list[int], joined: Sequence[list[int]], known: Cuts
    ) -> tuple[_Part, CutKey]:
        """Hubs with what they join, or values without any; and what their cut depends on."""
        alike: dict[CutKey, list[list[int]]] = {}
        for each in joined:
            alike.setdefault(self._shape(hubs, each), []).append(each)
        members, times, shapes = list(hubs), [1] * len(hubs), [self._shape([], hubs)]
        values, which = list(hubs), list(range(len(hubs)))
        for shape, some in alike.items():
            for each in some:
                values += each
                which += range(len(members), len(members) + len(each))
            members += some[0]
            times += [len(some)] * len(some[0])
            shapes += [shape, ((len(some),),)]
        ends = self.segments[min(values)] == self.count - 1
        where = np.array(values, np.intp), np.array(which, np.intp)
        key = tuple(shapes)
        return _Part(members, times, *where, ends, known.setdefault(key, Cut())), key

    def _shape(self, hubs: Sequence[int], members: Sequence[int]) -> CutKey:
        place = {i: k for k, i in enumerate([*hubs, *members])}
        return tuple(
            (
                self.values[i].nbytes,
                self.values[i].inner,
                self.values[i].seconds,
                self.values[i].transfer,
                self.values[i].needed,
                self._stays(i),
                self._leaves(i),
                tuple(place[source] for source in self.values[i].sources if source in place),
            )
            for i in members
        )

    def _leaves(self, i: int) -> bool:
        """Whether a value may be kept: inside a region of the user's it is computed again."""
        return self.values[i].again < 0 or self._stays(i)

    def _cut(self, part: _Part, price: float, charge: float) -> Fates:
        members = part.members
        place = {i: k for k, i in enumerate(members)}
        edges, source, sink = [], 2 * len(members), 2 * len(members) + 1
        for k, (i, times) in enumerate(zip(members, part.times)):
            one = self.values[i]
            computed, there = 2 * k, 2 * k + 1
            own = UNCUT if self._stays(i) else times * round(one.seconds * _UNIT)
            edges.append((source, computed, 0 if not self._leaves(i) else own))
            kept = UNCUT
            if self._leaves(i):
                kept = times * round(min(one.nbytes * price, _transferred(one, charge)) * _UNIT)
            edges.append((computed, there, kept))
            if one.inner and self._leaves(i) and not self._stays(i):
                edges.append((computed, sink, times * round(one.inner * price * _UNIT)))
            if one.needed:
                edges.append((there, sink, UNCUT))
            if not self._stays(i):
                edges += [(2 * place[s] + 1, computed, UNCUT) for s in one.sources if s in place]
        backward = minimum_cut(2 * len(members) + 2, edges, source, sink)
        fates = []
        for k, i in enumerate(members):
            if backward[2 * k]:
                fates.append(Fate.AGAIN)
            else:
                there = backward[2 * k + 1]
                fates.append(_kept(self.values[i], price, charge) if there else Fate.UNREAD)
        return np.array(fates, np.int8)


def _find(root: list[int], i: int) -> int:
    """The one that stands for what `i` is joined to: the first of them."""
    while root[i] != i:
        root[i] = root[root[i]]
        i = root[i]
    return i


def _join(root: list[int], i: int, other: int) -> None:
    one, other = _find(root, i), _find(root, other)
    root[max(one, other)] = min(one, other)


def _kept(one: RankValue, price: float, charge: float) -> Fate:
    """Where a value is kept."""
    return Fate.HOST if _transferred(one, charge) < one.nbytes * price else Fate.KEPT


def _transferred(one: RankValue, charge: float) -> float:
    return math.inf if math.isinf(charge) else one.transfer * charge


def _crossing(values: Sequence[RankValue], segments: Sequence[int]) -> list[bool]:
    """Whether a value is read in a later segment, or a later region of the user's, than its own."""
    found = [False] * len(values)
    for i, one in enumerate(values):
        for source in one.sources:
            if segments[source] != segments[i] or 0 <= values[source].again < one.again:
                found[source] = True
    return found
