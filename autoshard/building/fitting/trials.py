"""The choices of what is computed again, tried for one placement after another under a budget.

A trial counts a program's memory operator by operator (autoshard/memory/), which is quick; that of
Inductor's code is counted buffer by buffer, and making the code takes seconds. So by how much code
needs more or less than its operators do is learnt from each trial: it tells which choice of the
next placement is worth code, and passes over placements that would need too much with any.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from autoshard.memory import step_of, summary
from autoshard.planning import Recomputation
from autoshard.planning.estimate import frontier
from autoshard.program import Program

_MOST_TRIALS = 8
_MOST_TRIES = 4
_BY_OPERATOR = "aot_eager"
_CODED = "inductor"
_COUNTED = 0.999
_PREDICTED = 0.95
"""The part of a budget that Inductor's code may be predicted to need: see tests/memory."""

_SURELY = 1.05
"""What code needs beside its operators differs by some percent of a step between placements."""


class Tried(NamedTuple):
    """What one placement needs. chosen: what it computes again; None: nothing. needed: bytes, at
    most those of the budget where it fits. counted: whether they are; else they are predicted.
    bound: whether the first graph's choice is kept, where another would need less."""

    chosen: Recomputation | None
    needed: int
    counted: bool = True
    bound: bool = False


def counted_part(inner: str) -> float:
    """The part of a budget that may be counted: what is left is for what the count misses, a few
    scalars, or some percent of what Inductor's code allocates."""
    return _PREDICTED if inner == "inductor" else _COUNTED


def counted(program: Program) -> int:
    """Bytes of a step, operator by operator."""
    return summary(step_of(program, inner=_BY_OPERATOR)).peak


class Trials:
    """Those of one graph under a budget of `budget` bytes a rank."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.beside: int | None = None
        """Bytes that code needed beside its operators, at the last trial of code."""

    def quickest(
        self,
        free: Program,
        before: int,
        build: Callable[[Recomputation], Program],
        last_first: bool = False,
    ) -> Tried:
        """The quickest choice with which a step fits, else the last one.

        free: the program without a choice, of `before` bytes. build: makes that of a choice.
        last_first: whether only a placement whose last choice fits is worth more code.
        """
        part = counted_part(free.config.inner)
        room, search = int(self.budget * part), _ProgramSearch(free, before)
        last = len(search.estimates) - 1
        if last < 0:
            return Tried(None, math.ceil(before / part) + 1)

        def told(index: int, peak: int, counted: bool = True) -> Tried:
            needed = self.budget if peak <= room else math.ceil(peak / part) + 1
            return Tried(search.choices.recomputation(index), needed, counted)

        if free.config.inner != _CODED:
            found = search.run(room)
            index = last if found is None else found
            return told(index, search.peak(index))
        if last_first:
            smallest = self._code(search, last, build)
            found = search.run(room - (self.beside or 0)) if smallest <= room else None
            if found is not None and found < last:
                peak = self._code(search, found, build)
                if peak <= room:
                    return told(found, peak)
            return told(last, smallest)
        for _ in range(_MOST_TRIES):
            found = search.run(room - (self.beside or 0))
            if found is None:
                break
            peak = self._code(search, found, build)
            if peak <= room:
                return told(found, peak)
        predicted = search.peak(last) + (self.beside or 0)
        if self.beside is not None and predicted > _SURELY * room:
            return told(last, predicted, counted=False)
        return told(last, self._code(search, last, build))

    def _code(
        self, search: _ProgramSearch, index: int, build: Callable[[Recomputation], Program]
    ) -> int:
        """Bytes of a step by the code of a choice."""
        peak = summary(step_of(build(search.choices.recomputation(index)))).peak
        self.beside = peak - search.peak(index)
        return peak


class Bisection:
    """The search for the quickest of choices that fits, counting few of them: choices are in the
    order that planning/estimate/frontiers.py gives them, by rising seconds.

    estimates: bytes of each choice, by rising seconds; more: bytes that were counted beside those,
    at the last trial. cheapest: the index of the quickest whose estimate fits so many bytes; None:
    there is none. count: the bytes of one.
    """

    def __init__(
        self,
        estimates: Sequence[int],
        more: int,
        cheapest: Callable[[int], int | None],
        count: Callable[[int], int],
    ) -> None:
        self.estimates, self.more, self.cheapest, self.count = estimates, more, cheapest, count
        self.counted: dict[int, int] = {}

    def run(self, budget: int) -> int | None:
        """The index of the quickest choice found to fit; None: there is none."""
        low, high = 0, len(self.estimates)
        for _ in range(_MOST_TRIALS):
            if low >= high:
                break
            guess = self._guess(low, high, budget)
            if self.peak(guess) <= budget:
                high = guess
            else:
                low = guess + 1
        if high < len(self.estimates):
            return high
        last = len(self.estimates) - 1  # not reached, where trials ran out
        return last if low <= last and self.peak(last) <= budget else None

    def peak(self, index: int) -> int:
        """Bytes with the choice of an index, operator by operator."""
        if index not in self.counted:
            self.counted[index] = self.count(index)
        self.more = self.counted[index] - self.estimates[index]
        return self.counted[index]

    def _guess(self, low: int, high: int, budget: int) -> int:
        found = self.cheapest(budget - self.more)
        return max(low, min(high - 1, len(self.estimates) if found is None else found))


class _ProgramSearch(Bisection):
    """That of a program. before: bytes that were counted without a choice."""

    def __init__(self, free: Program, before: int) -> None:
        self.free = free
        cluster = free.machine
        host = free.config.host_memory
        graph = (free.serial, free.decisions)
        self.choices = frontier(*graph, free.axis.size, cluster, host_memory=host)
        self.points = self.choices.points
        self.graphs = free.choices()
        peaks = [one.peak for one in self.points]
        more = before - self.choices.free[0].peak if peaks else 0
        super().__init__(peaks, more, self.choices.cheapest, self._count)

    def _count(self, index: int) -> int:
        graphs = self.graphs(self.choices.recomputation(index))
        return summary(step_of(self.free, graphs=graphs)).peak
