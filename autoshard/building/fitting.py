"""A program under a memory budget: the quickest choice with which its peak fits, as counted, of
what is kept, on the device or on the host, and what is computed again.

The planner's account of memory is an estimate; here the graphs that would run are made, and their
memory is counted operator by operator (autoshard/memory/), that of Inductor's code buffer by
buffer. A bisection of the choices, in the order that planning/estimate/frontiers.py gives them,
needs a handful.
"""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Protocol

from torch import fx

from autoshard.errors import ConfigError, PlanError, message
from autoshard.memory import step_of, summary
from autoshard.planning import Decisions, Recomputation, strategy_text, target_name
from autoshard.planning.chunked_loss import NEEDED, plan_losses
from autoshard.planning.cost import planned_on
from autoshard.planning.estimate import Layout, Training, footprint, frontier, held
from autoshard.program import Program
from autoshard.runtime.collectives import data_axes

_MOST_TRIALS = 8
_MOST_TRIES = 4
_BY_OPERATOR = "aot_eager"
_SAFE = 2
"""An estimate this many times below the budget needs no count."""
_COUNTED = 0.999
_PREDICTED = 0.95
"""The part of a budget that Inductor's code may be predicted to need: see tests/memory."""


class BudgetTooSmall(PlanError):
    """No plan fits a budget of `budget` bytes a rank; one was found that needs `needed`."""

    def __init__(self, budget: int, needed: int) -> None:
        self.needed = needed
        super().__init__(
            message(
                f"no plan fits memory_budget={budget:,} bytes a rank: with all recomputed that can "
                f"be, a step needs {needed:,} bytes, {needed - budget:,} more",
                remedy=f"Raise the budget to {needed:,}, or use a smaller batch or more ranks.",
            )
        )


class Revisable(Protocol):
    """A graph with decisions that may be taken back."""

    serial: fx.GraphModule
    decisions: Decisions

    def take(self, decisions: Decisions) -> None:
        """Follow other decisions on the same graph."""

    def plan_losses(self, decisions: Decisions, fits: bool) -> bool:
        """Decide which losses go by chunks, where a step fits its budget otherwise or does not;
        whether there are any."""


def recompute(
    planned: Revisable, build: Callable[[], Program], budget: int, assumed: bool, inner: str
) -> None:
    """Decide what is computed again so that a step stays within `budget` bytes a rank.

    build: makes the program of the decisions as they are, for the first rank, whose parts are the
    largest: all ranks decide on the same one. assumed: nobody asked for the budget: where nothing
    fits it, what needs least is taken, with a warning; otherwise BudgetTooSmall is raised, and
    ConfigError where `inner`, the inner compiler, computes nothing again.
    """
    if inner == "eager":
        return _say_that_all_is_kept(build(), budget, assumed)
    candidates = [planned.decisions, *planned.decisions.others]
    # an estimate may be above what the graphs need
    default = planned.decisions.unbudgeted or planned.decisions
    planned.take(default)
    default.recomputation = None
    planned.plan_losses(default, fits=True)
    free = build()
    fits = _fits(free, budget)
    chooses = free.config.chunk_loss == "auto"
    chunked = chooses and not fits and planned.plan_losses(default, fits=False)
    if chooses and data_axes(free.mesh.axes):
        chunked = _chunked.setdefault((_operators(free), budget), chunked)
        planned.plan_losses(default, fits=not chunked)
    if fits or (chunked and _fits(build(), budget)):
        return
    failed: list[tuple[int, Decisions, Recomputation]] = []
    for each in candidates:
        planned.take(each)
        planned.plan_losses(each, fits=not chunked)
        found, needed = _decide(each, build, budget)
        if needed <= budget:
            return
        if found is not None:
            failed.append((needed, each, found))
    needed, least, found = min(failed, key=lambda one: one[0])
    told = BudgetTooSmall(budget, needed)
    if not assumed:
        raise told
    warnings.warn(str(told), stacklevel=2)
    planned.take(least)
    least.recomputation = found


def _decide(
    decisions: Decisions, build: Callable[[], Program], budget: int
) -> tuple[Recomputation | None, int]:
    """The choice for one placement, which it gets, and the bytes that a step needs with it."""
    decisions.recomputation = None
    free = build()
    if _fits(free, budget):
        return None, 0
    key = (_operators(free), budget)
    shared = bool(data_axes(free.mesh.axes))
    if shared and key in _decided:
        # data-parallel ranks compile other lengths at other times, and gather in one order
        decisions.recomputation = _decided[key]
        return decisions.recomputation, budget

    def chosen(one: Recomputation) -> Program:
        decisions.recomputation = one
        return build()

    found, needed = _smallest(free, chosen, budget)
    decisions.recomputation = found
    if shared and needed <= budget:
        _decided[key] = found
    return found, needed


_decided: dict[tuple[str, int], Recomputation | None] = {}
_chunked: dict[tuple[str, int], bool] = {}


def chunk_as_first(planned: Revisable) -> None:
    """Have losses by chunks, or whole, as in the first graph of the same operators, where no
    budget is known: a loss by chunks gathers a weight once, and data-parallel ranks, which compile
    other lengths at other times, gather in one order."""
    chunked = any(one.chunked for one in planned.decisions.losses.values())
    first = _chunked.setdefault((_operators(planned), 0), chunked)
    if first != chunked:
        how = NEEDED if first else None
        n = planned.decisions.prices.n
        planned.decisions.losses = plan_losses(planned.serial, planned.decisions, n, how)


def _operators(program: Revisable | Program) -> str:
    """A hash of a graph's operators and their strategies, whatever its shapes."""
    text = hashlib.sha256()
    for node in program.serial.graph.nodes:
        strategy = program.decisions.strategies.get(node)
        states = strategy_text(strategy) if strategy is not None else ""
        text.update(f"{node.op} {node.name} {target_name(node)} {states}\n".encode())
    return text.hexdigest()


def _say_that_all_is_kept(free: Program, budget: int, assumed: bool) -> None:
    """Raise or warn, unless a step stays within the budget as it is: autograd records the local
    graph operator by operator, and nothing cuts it. What that keeps is not counted either."""
    if not _is_sure(free, budget):
        refuse_eager(budget, assumed)


def refuse_eager(budget: int, assumed: bool = False) -> None:
    """Raise, or warn of a budget that nobody asked for."""
    told = message(
        f"memory_budget={budget:,} bytes a rank: inner='eager' computes nothing again in backward "
        "and keeps what autograd keeps, and the estimate of a step is not below half of the budget",
        remedy="Use inner='aot_eager' or 'inductor', or leave out memory_budget.",
    )
    if not assumed:
        raise ConfigError(told)
    warnings.warn(told, stacklevel=2)


def _is_sure(free: Program, budget: int) -> bool:
    """Whether the estimate of a step is so far below the budget that it needs no count."""
    kept = held(free.serial, free.decisions, free.parameters, free.axis.size)
    sizes = {one.name: one.size for one in free.mesh.axes}
    layout = Layout.of(
        sizes, free.config.zero, free.config.bucket_bytes, free.config.defer_reduction
    )
    training = Training(states=free.config.optimizer_states)
    return _SAFE * footprint(kept, layout, training).total <= budget


def _fits(free: Program, budget: int) -> bool:
    """Whether a step stays within the budget as it is."""
    return _is_sure(free, budget) or _counted(free) <= int(budget * counted_part(free.config.inner))


def _counted(free: Program) -> int:
    return summary(step_of(free, inner=_BY_OPERATOR)).peak


def counted_part(inner: str) -> float:
    """The part of a budget that may be counted: what is left is for what the count misses, a few
    scalars, or some percent of what Inductor's code allocates."""
    return _PREDICTED if inner == "inductor" else _COUNTED


def _smallest(
    free: Program, build: Callable[[Recomputation], Program], budget: int
) -> tuple[Recomputation, int]:
    """The quickest choice with which a step fits, else the last one, and the bytes it needs."""
    coded = free.config.inner == "inductor"  # which allocates in an order of its own
    part = counted_part(free.config.inner)
    room, search = int(budget * part), _Search(free, _counted(free))

    def need(index: int) -> tuple[Recomputation, int]:
        chosen = search.choices.recomputation(index)
        return chosen, summary(step_of(build(chosen))).peak if coded else search.peak(index)

    target, last = room, len(search.points) - 1
    for _ in range(_MOST_TRIES):
        found = search.run(target)
        if found is None:
            break
        chosen, peak = need(found)
        if peak <= room:
            return chosen, budget
        target -= peak - room
    chosen, peak = need(last)
    return chosen, budget if peak <= room else math.ceil(peak / part) + 1


class Bisection:
    """The search for the quickest of choices that fits, counting few of them.

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


class _Search(Bisection):
    """That of a program. before: bytes that were counted without a choice."""

    def __init__(self, free: Program, before: int) -> None:
        self.free = free
        cluster = planned_on(free.hardware)
        host = free.config.host_memory
        graph = (free.serial, free.decisions)
        self.choices = frontier(*graph, free.axis.size, cluster, host_memory=host)
        self.points = self.choices.points
        self.graphs = free.choices()
        more = before - self.choices.free[0].peak if self.points else 0
        peaks = [one.peak for one in self.points]
        super().__init__(peaks, more, self.choices.cheapest, self._count)

    def _count(self, index: int) -> int:
        graphs = self.graphs(self.choices.recomputation(index))
        return summary(step_of(self.free, graphs=graphs)).peak
