"""A program under a memory budget: the least recomputation with which its peak fits, as counted.

The planner's account of memory is an estimate; here the graphs that would run are made, and their
memory is counted operator by operator (autoshard/memory/). A bisection of the choices that the
frontier orders (planning/estimate/frontier.py) needs a handful of them.
"""

from __future__ import annotations

from autoshard.errors import PlanError, message
from autoshard.memory import step_of, summary
from autoshard.planning import Recomputation
from autoshard.planning.cost import planned_on
from autoshard.planning.estimate import Frontier, frontier
from autoshard.program import Program

_MOST_TRIALS = 8


def fit(free: Program, budget: int) -> Recomputation | None:
    """What is computed again so that a step of the program stays within `budget` bytes.

    free: the program without recomputation. None: it fits as it is. Raises PlanError where no
    choice fits.
    """
    before = summary(step_of(free, inner="aot_eager")).peak
    if before <= budget:
        return None
    cluster = planned_on(free.hardware)
    choices = frontier(free.serial, free.decisions, free.axis.size, cluster)
    search = _Search(free, budget, choices, before)
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
    return choices.recomputation(found)


class _Search:
    """The bisection; `smallest`: the least that was counted."""

    def __init__(self, free: Program, budget: int, choices: Frontier, before: int) -> None:
        self.free, self.budget = free, budget
        self.points, self.choices = choices.points, choices
        self.graphs = free.choices()
        self.smallest = before
        self.more = before - self.points[0].peak if self.points else 0
        """Bytes that were counted beside those that the frontier knows, at the last trial."""

    def run(self) -> int | None:
        """The index of the quickest choice found to fit; None: there is none."""
        low, high = 0, len(self.points)
        for _ in range(_MOST_TRIALS):
            if low >= high:
                break
            guess = self._guess(low, high)
            if self._peak(guess) <= self.budget:
                high = guess
            else:
                low = guess + 1
        if high < len(self.points):
            return high
        last = len(self.points) - 1  # not reached, where trials ran out
        return last if low <= last and self._peak(last) <= self.budget else None

    def _peak(self, index: int) -> int:
        graphs = self.graphs(self.choices.recomputation(index))
        found = summary(step_of(self.free, graphs=graphs)).peak
        self.more = found - self.points[index].peak
        self.smallest = min(self.smallest, found)
        return found

    def _guess(self, low: int, high: int) -> int:
        found = self.choices.cheapest(self.budget - self.more)
        return max(low, min(high - 1, len(self.points) if found is None else found))
