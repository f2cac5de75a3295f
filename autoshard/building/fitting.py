"""A program under a memory budget: the least recomputation with which its peak fits, as counted.

The planner's account of memory is an estimate; here the graphs that would run are made, and their
memory is counted operator by operator (autoshard/memory/). A bisection of the choices that the
frontier orders (planning/estimate/frontier.py) needs a handful of them.
"""

from __future__ import annotations

from collections.abc import Callable

from autoshard.errors import PlanError, message
from autoshard.memory import step_of, summary
from autoshard.planning import Decisions
from autoshard.planning.cost import planned_on
from autoshard.planning.estimate import Frontier, frontier
from autoshard.program import Program

_MOST_TRIALS = 8


def fit(decisions: Decisions, build: Callable[[], Program], budget: int) -> None:
    """Decide what is computed again, so that a step of the program stays within `budget` bytes.

    build: makes the program of `decisions` as they then are. Raises PlanError where no choice fits.
    """
    decisions.recomputation = None
    free = build()
    before = peak_of(free)
    if before <= budget:
        return
    machine = planned_on(free.hardware)
    choices = frontier(free.serial, decisions, free.axis.size, machine)
    search = _Search(decisions, build, budget, choices, before)
    found = search.run()
    if found is None:
        raise PlanError(
            message(
                f"no plan fits memory_budget={budget:,} bytes a rank: with all recomputed that can "
                f"be, a step needs {search.smallest:,} bytes, {search.smallest - budget:,} more; "
                f"without recomputation {before:,}",
                remedy=f"Raise the budget to {search.smallest:,}, use a smaller batch or more "
                "ranks.",
            )
        )
    decisions.recomputation = choices.recomputation(found)


def peak_of(program: Program) -> int:
    """Bytes of a rank at the worst moment of a step, graphs run operator by operator."""
    return summary(step_of(program, inner="aot_eager")).peak


class _Search:
    """The bisection; `smallest`: the least that was counted."""

    def __init__(
        self,
        decisions: Decisions,
        build: Callable[[], Program],
        budget: int,
        choices: Frontier,
        before: int,
    ) -> None:
        self.decisions, self.build, self.budget = decisions, build, budget
        self.points, self.choices = choices.points, choices
        self.smallest = before
        self.more = before - self.points[0].peak if self.points else 0
        """Bytes that were counted beside those that the frontier knows, at the last trial."""

    def run(self) -> int | None:
        """The index of the quickest choice found to fit; None: there is none."""
        low, high = 0, len(self.points)
        guess = self._guess(low, high)
        for _ in range(_MOST_TRIALS):
            if low >= high:
                break
            if self._peak(guess) <= self.budget:
                high = guess
            else:
                low = guess + 1
            guess = self._guess(low, high)
        if high == len(self.points):
            # too many trials for nothing: the smallest, which may be another than the last
            last = len(self.points) - 1
            return last if low <= last and self._peak(last) <= self.budget else None
        return high

    def _peak(self, index: int) -> int:
        self.decisions.recomputation = self.choices.recomputation(index)
        found = peak_of(self.build())
        self.more = found - self.points[index].peak
        self.smallest = min(self.smallest, found)
        return found

    def _guess(self, low: int, high: int) -> int:
        found = self.choices.cheapest(self.budget - self.more)
        return max(low, min(high - 1, len(self.points) if found is None else found))
