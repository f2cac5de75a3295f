"""A program under a memory budget: the least recomputation with which its peak fits, as counted.

The planner's account of memory is an estimate; here the graphs that would run are made, and their
memory is counted operator by operator (autoshard/memory/), and of Inductor's code buffer by buffer.
A bisection of the choices that the frontier orders (planning/estimate/frontier.py) needs a handful.
"""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Callable

from autoshard.errors import PlanError, message
from autoshard.memory import step_of, summary
from autoshard.planning import Decisions, Recomputation, strategy_text
from autoshard.planning.cost import planned_on
from autoshard.planning.estimate import Layout, Training, footprint, frontier, held
from autoshard.program import Program
from autoshard.runtime.collectives import data_axes

_MOST_TRIALS = 8
_MOST_TRIES = 4
_BY_OPERATOR = "aot_eager"
_SAFE = 2
"""An estimate this many times below the budget needs no count."""
_PREDICTED = 0.95
"""The part of a budget that Inductor's code may be predicted to need: see tests/memory."""


def recompute(
    decisions: Decisions, build: Callable[[], Program], budget: int, assumed: bool
) -> None:
    """Decide what is computed again so that a step stays within `budget` bytes a rank.

    build: makes the program of `decisions` as they are, for the first rank, whose parts are the
    largest: all ranks decide on the same one. assumed: nobody asked for the budget: where nothing
    fits it, what needs least is taken, with a warning; otherwise PlanError is raised.
    """
    decisions.recomputation = None
    free = build()
    key = (_operators(free), budget)
    axes = data_axes(free.mesh.axes)
    if axes and key in _decided:
        # data-parallel ranks compile other lengths at other times, and gather in one order
        decisions.recomputation = _decided[key]
        return

    def chosen(one: Recomputation) -> Program:
        decisions.recomputation = one
        return build()

    decisions.recomputation, told = _fit(free, chosen, budget)
    if told and assumed:
        warnings.warn(told, stacklevel=2)
    elif told:
        raise PlanError(told)
    if axes:
        _decided[key] = decisions.recomputation


_decided: dict[tuple[str, int], Recomputation | None] = {}


def _operators(program: Program) -> str:
    """A hash of a graph's operators and their strategies, whatever its shapes."""
    text = hashlib.sha256()
    for node in program.serial.graph.nodes:
        strategy = program.decisions.strategies.get(node)
        states = strategy_text(strategy) if strategy is not None else ""
        text.update(f"{node.op} {node.name} {node.target} {states}\n".encode())
    return text.hexdigest()


def _fit(
    free: Program, build: Callable[[Recomputation], Program], budget: int
) -> tuple[Recomputation | None, str]:
    """The choice with which a step fits, None where it does as it is; else the smallest, and what
    is missing."""
    kept = held(free.serial, free.decisions, free.parameters, free.axis.size)
    config = free.config
    sizes = {one.name: one.size for one in free.mesh.axes}
    layout = Layout.of(sizes, config.zero, config.bucket_bytes)
    if _SAFE * footprint(kept, layout, Training()).total <= budget:
        return None, ""
    # Inductor allocates in an order of its own: its code is asked, and said within some percent
    coded = config.inner == "inductor"
    room = int(budget * _PREDICTED) if coded else budget
    before = summary(step_of(free, inner=_BY_OPERATOR)).peak
    if before <= room:
        return None, ""
    search = _Search(free, before)
    target, smallest = room, before
    for _ in range(_MOST_TRIES):
        found = search.run(target)
        if found is None:
            break
        chosen = search.choices.recomputation(found)
        peak = summary(step_of(build(chosen))).peak if coded else search.smallest
        if not coded or peak <= room:
            return chosen, ""
        smallest = min(smallest, peak)
        target -= peak - room
    smallest = min(smallest, search.smallest) if target == room else smallest
    smallest = math.ceil(smallest * budget / room)
    told = message(
        f"no plan fits memory_budget={budget:,} bytes a rank: with all recomputed that can be, "
        f"a step needs {smallest:,} bytes, {smallest - budget:,} more; without recomputation "
        f"{before:,}",
        remedy=f"Raise the budget to {smallest:,}, or use a smaller batch or more ranks.",
    )
    return search.choices.recomputation(search.least()), told


class _Search:
    """The bisection; `smallest`: the least that was counted."""

    def __init__(self, free: Program, before: int) -> None:
        self.free = free
        cluster = planned_on(free.hardware)
        self.choices = frontier(free.serial, free.decisions, free.axis.size, cluster)
        self.points = self.choices.points
        self.graphs = free.choices()
        self.counted: dict[int, int] = {}
        self.smallest = before
        self.more = before - self.points[0].peak if self.points else 0
        """Bytes that were counted beside those that the frontier knows, at the last trial."""

    def run(self, budget: int) -> int | None:
        """The index of the quickest choice found to fit; None: there is none."""
        low, high = 0, len(self.points)
        for _ in range(_MOST_TRIALS):
            if low >= high:
                break
            guess = self._guess(low, high, budget)
            if self._peak(guess) <= budget:
                high = guess
            else:
                low = guess + 1
        if high < len(self.points):
            return high
        last = len(self.points) - 1  # not reached, where trials ran out
        return last if low <= last and self._peak(last) <= budget else None

    def least(self) -> int:
        """The index of the choice that was counted to need least."""
        return min(self.counted, key=lambda index: (self.counted[index], index), default=0)

    def _peak(self, index: int) -> int:
        if index not in self.counted:
            graphs = self.graphs(self.choices.recomputation(index))
            self.counted[index] = summary(step_of(self.free, graphs=graphs)).peak
        found = self.counted[index]
        self.more = found - self.points[index].peak
        self.smallest = min(self.smallest, found)
        return found

    def _guess(self, low: int, high: int, budget: int) -> int:
        found = self.choices.cheapest(budget - self.more)
        return max(low, min(high - 1, len(self.points) if found is None else found))
