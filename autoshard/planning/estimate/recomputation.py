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
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from autoshard.planning.estimate.recomputable import RankValue
from autoshard.planning.solver import UNCUT, minimum_cut

#: Femtoseconds, in which costs are whole numbers: sums do not depend on the order of additions.
_UNIT = 1e15


class Fate(IntEnum):
    """The fate of a value in backward: nobody reads it, it is kept, computed again, or kept in the
    memory of the host."""

    UNREAD = 0
    KEPT = 1
    AGAIN = 2
    HOST = 3


Cuts = dict[tuple[object, ...], tuple[Fate, ...]]
"""The fates of the values of a part, by the prices and its text."""


@dataclass(frozen=True)
class _Part:
    """Values that are decided together. text: equal in equal parts, whose values have equal
    fates in order."""

    values: tuple[int, ...]
    text: tuple[tuple[object, ...], ...]


class Choices:
    """The choices that values in segments leave, for any price.

    Values that cross a border are not computed again. known: cuts that others have made, of equal
    parts.
    """

    def __init__(
        self, values: Sequence[RankValue], segments: Sequence[int], known: Cuts | None = None
    ) -> None:
        self.values, self.segments = values, segments
        self.count = segments[-1] + 1 if segments else 0
        self.compute = [0.0] * self.count
        """By segment: seconds of its forward, beside which transfers run."""
        for one, segment in zip(values, segments):
            self.compute[segment] += one.seconds
        self.crosses = _crossing(values, segments)
        self.parts = self._parts()
        self._solved: Cuts = {} if known is None else known
        self.solved = 0
        """Cuts that were made: equal parts share one."""

    def fates(self, price: float, last: float, charge: float = math.inf) -> list[Fate]:
        """The fate of each value, at `price` seconds a kept byte; `last`: in the last segment, of
        which nothing goes to the host. charge: seconds for one of a transfer; infinite: none is."""
        found = [Fate.UNREAD] * len(self.values)
        end = self.segments[-1] if self.segments else 0
        for i, one in enumerate(self.values):
            if one.needed and self._stays(i):
                own = math.inf if self.segments[i] == end else charge
                found[i] = _kept(one, price, own)
        for part in self.parts:
            ends = self.segments[part.values[0]] == end
            here, own = (last, math.inf) if ends else (price, charge)
            key = (here, own, part.text)
            if key not in self._solved:
                self.solved += 1
                self._solved[key] = self._cut(part.values, here, own)
            for i, fate in zip(part.values, self._solved[key]):
                found[i] = fate
        return found

    def _stays(self, i: int) -> bool:
        """Whether a value cannot be computed again."""
        return self.values[i].once or self.crosses[i]

    def _parts(self) -> list[_Part]:
        fixed = [one.needed and self._stays(i) for i, one in enumerate(self.values)]
        root = list(range(len(self.values)))

        def find(i: int) -> int:
            while root[i] != i:
                root[i] = root[root[i]]
                i = root[i]
            return i

        for i, one in enumerate(self.values):
            if not self._stays(i):
                for source in one.sources:
                    if not fixed[source]:
                        a, b = find(i), find(source)
                        root[max(a, b)] = min(a, b)
        groups: dict[int, list[int]] = {}
        for i in range(len(self.values)):
            if not fixed[i]:
                groups.setdefault(find(i), []).append(i)
        return [_Part(tuple(members), self._text(members)) for members in groups.values()]

    def _text(self, members: Sequence[int]) -> tuple[tuple[object, ...], ...]:
        place = {i: k for k, i in enumerate(members)}
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

    def _cut(self, members: Sequence[int], price: float, charge: float) -> tuple[Fate, ...]:
        place = {i: k for k, i in enumerate(members)}
        edges, source, sink = [], 2 * len(members), 2 * len(members) + 1
        for k, i in enumerate(members):
            one = self.values[i]
            computed, there = 2 * k, 2 * k + 1
            own = UNCUT if self._stays(i) else round(one.seconds * _UNIT)
            edges.append((source, computed, 0 if not self._leaves(i) else own))
            kept = UNCUT
            if self._leaves(i):
                kept = round(min(one.nbytes * price, _transferred(one, charge)) * _UNIT)
            edges.append((computed, there, kept))
            if one.inner and self._leaves(i) and not self._stays(i):
                edges.append((computed, sink, round(one.inner * price * _UNIT)))
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
        return tuple(fates)


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
