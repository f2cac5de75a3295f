"""A program under a memory budget: the quickest choice with which its peak fits, as counted, of
what is kept, on the device or on the host, and what is computed again.

The planner's account of memory is an estimate; here the graphs that would run are made, and their
memory is counted, for one placement after another, the quickest first. A trial counts a program's
memory operator by operator (autoshard/memory/), which is quick; that of Inductor's code is counted
buffer by buffer, and making the code takes seconds. So by how much code needs more or less than its
operators do is learnt from each trial: it tells which choice of the next placement is worth code,
and passes over placements that would need too much with any.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary

from autoshard.building.planned import Planned, Unplanned
from autoshard.compiling import Collective, collectives_of
from autoshard.errors import ConfigError, PlanError, message
from autoshard.memory import step_of, summary
from autoshard.planning import JoinedChoices, Recomputation, fingerprint, inputs_of, strategy_text
from autoshard.planning.chunked_loss import NEEDED
from autoshard.planning.estimate import Frontier, footprint, frontier, held
from autoshard.program import Program
from autoshard.runtime.collectives import Axis, data_axes
from autoshard.runtime.parameters import is_planned

SAFE = 2
"""An estimate this many times below the budget needs no count."""

_MOST_TRIALS = 8
_MOST_TRIES = 4
_BY_OPERATOR = "aot_eager"
_CODED = "inductor"
_COUNTED = 0.999
_PREDICTED = 0.95
"""The part of a budget that Inductor's code may be predicted to need: see tests/memory."""

_SURELY = 1.05
"""What code needs beside its operators differs by some percent of a step between placements."""

_ALL = "with all recomputed that can be"
_AS_FIRST = (
    "with what the model's first batch computes again, as data-parallel ranks gather in one order"
)

Remembered = dict[str, Any]
"""What the first graph of some operators has decided, by a hash of these: what it computes again,
and whether its losses go by chunks."""


class BudgetTooSmall(PlanError):
    """No plan fits a budget of `budget` bytes a rank; one was found that needs `needed`. bound:
    whether another choice than the first graph's would fit."""

    def __init__(self, budget: int, needed: int, bound: bool = False) -> None:
        self.needed = needed
        longest = "run the model's largest batch first, " if bound else ""
        super().__init__(
            f"no plan fits a memory budget of {budget:,} bytes a rank: "
            f"{_AS_FIRST if bound else _ALL}, a step needs {needed:,} bytes, "
            f"{needed - budget:,} more",
            remedy=f"Raise the budget to {needed:,}, {longest}or use a smaller batch or more "
            "ranks.",
        )


_remembered: Any = WeakTensorKeyDictionary()
"""By stored parameter, then by options."""


def remembered_by(
    parameters: Sequence[nn.Parameter], axes: Sequence[Axis], options: Sequence[str]
) -> Remembered:
    """What graphs of a stored model with these options share on the data-parallel axes of a mesh,
    whose ranks compile other lengths at other times and gather in one order; nothing elsewhere."""
    stored = [p for p in parameters if isinstance(p, DTensor) and is_planned(p)]
    if not stored or not data_axes(axes):
        return {}
    of_model = _remembered.setdefault(stored[0], {})
    return of_model.setdefault("\n".join(options), {})  # type: ignore[no-any-return]


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


def fit(
    asked: Unplanned,
    planned: Planned,
    build: Callable[[Planned], Program],
    budget: int,
    assumed: bool,
    remembered: Remembered,
) -> Planned:
    """The plan whose step stays within `budget` bytes a rank, with what is computed again for that.

    planned: of what was asked. build: makes the program of a plan for the first rank, whose parts
    are the largest: all ranks decide on the same one. assumed: nobody asked for the budget: where
    nothing fits it, what needs least is taken, with a warning; otherwise BudgetTooSmall is raised,
    of a budget that was tried, at which other plans are candidates; and ConfigError where the inner
    compiler computes nothing again. remembered: what earlier graphs have decided, and where this
    one says it.
    """
    try:
        return _Fitting(asked, build, budget, assumed, remembered).run(planned)
    except BudgetTooSmall as small:
        told = small
    while True:
        request = replace(asked.request, memory_budget=told.needed)
        other = replace(asked, request=request).plan()
        try:
            _Fitting(asked, build, told.needed, assumed, {}).run(other)
        except BudgetTooSmall as larger:
            told = BudgetTooSmall(budget, larger.needed)
        else:
            raise told


class _Fitting:
    """The plans of one graph, as `fit` tries them."""

    def __init__(
        self,
        asked: Unplanned,
        build: Callable[[Planned], Program],
        budget: int,
        assumed: bool,
        remembered: Remembered,
    ) -> None:
        self.config, self.build, self.budget = asked.config, build, budget
        self.assumed, self.remembered = assumed, remembered
        self.part = counted_part(asked.config.inner)
        self.room = int(budget * self.part)
        self.beside: int | None = None
        """Bytes that code needed beside its operators, at the last trial of code."""

    def run(self, planned: Planned) -> Planned:
        if self.config.inner == "eager":
            if not self._is_sure(planned):
                refuse_eager(self.budget, self.assumed)
            return planned
        candidates = [planned.decisions, *planned.decisions.others]
        # an estimate may be above what the graphs need
        default = planned.following(planned.decisions.unbudgeted or planned.decisions)
        default = default.recomputing(None).with_losses(fits=True)
        fits, chunked = self._fits(default), False
        if self.config.chunk_loss == "auto":
            chunked = not fits and default.with_losses(fits=False).chunks
            chunked = self.remembered.setdefault(f"chunked {_operators(default)}", chunked)
            default = default.with_losses(fits=not chunked)
        if fits or (chunked and self._fits(default)):
            if self.remembered.setdefault(_again(default), None) is None:
                return default
        tried = list[tuple[Tried, Planned]]()

        def fits_with(each: Planned, last_first: bool = False) -> bool:
            found = self._decide(each, last_first)
            tried.append((found, each.recomputing(found.chosen)))
            return found.needed <= self.budget

        for decisions in candidates:
            if fits_with(planned.following(decisions).with_losses(fits=not chunked)):
                return tried[-1][1]
        for _, each in sorted((one for one in tried if not one[0].counted), key=_needs):
            if fits_with(each, last_first=True):
                return tried[-1][1]
        (_, needed, _, bound), least = min((one for one in tried if one[0].counted), key=_needs)
        told = BudgetTooSmall(self.budget, needed, bound)
        if not self.assumed:
            raise told
        warnings.warn(str(told), stacklevel=2)
        return least

    def _is_sure(self, planned: Planned) -> bool:
        """Whether the estimate of a step is so far below the budget that it needs no count."""
        decisions, request = planned.decisions, planned.request
        kept = held(planned.serial, decisions, planned.parameters, decisions.prices.n)
        return SAFE * footprint(kept, request.layout, request.training).total <= self.budget

    def _fits(self, planned: Planned) -> bool:
        """Whether a step stays within the budget as it is."""
        return self._is_sure(planned) or counted(self.build(planned)) <= self.room

    def _decide(self, planned: Planned, last_first: bool) -> Tried:
        """The choice for one placement: that of the first graph of its operators where it fits, or
        another with which collectives of the data-parallel axes have the same order. last_first: as
        in `_quickest`."""

        def built(one: Recomputation | None) -> Program:
            return self.build(planned.recomputing(one))

        key, free = _again(planned), built(None)
        before = 0 if self._is_sure(planned.recomputing(None)) else counted(free)
        known, first = key in self.remembered, self.remembered.get(key)
        usual = free if first is None else built(first)
        needed = before if first is None else counted(usual)
        if needed <= self.room and (known or first is None):
            self.remembered.setdefault(key, first)
            return Tried(first, needed)
        found = self._quickest(free, before, built, last_first)
        if known and found.needed <= self.budget and _order(built(found.chosen)) != _order(usual):
            return Tried(first, math.ceil(needed / self.part) + 1, bound=True)
        if found.needed <= self.budget:
            self.remembered.setdefault(key, found.chosen)
        return found

    def _quickest(
        self,
        free: Program,
        before: int,
        build: Callable[[Recomputation], Program],
        last_first: bool,
    ) -> Tried:
        """The quickest choice with which a step fits, else the last one.

        free: the program without a choice, of `before` bytes. build: makes that of a choice.
        last_first: whether only a placement whose last choice fits is worth more code.
        """
        graph, host = (free.serial, free.decisions), free.config.host_memory
        choices = frontier(*graph, free.axis.size, free.machine, host_memory=host)
        last = len(choices.points) - 1
        if last < 0:
            return Tried(None, math.ceil(before / self.part) + 1)
        room, graphs = self.room, free.choices()

        def count(index: int) -> int:
            return summary(step_of(free, graphs=graphs(choices.recomputation(index)))).peak

        search = Bisection(choices, before - choices.free.peak, count)

        def code(index: int) -> int:
            """Bytes of a step by the code of a choice."""
            peak = summary(step_of(build(choices.recomputation(index)))).peak
            self.beside = peak - search.peak(index)
            return peak

        def told(index: int, peak: int, counted: bool = True) -> Tried:
            needed = self.budget if peak <= room else math.ceil(peak / self.part) + 1
            return Tried(choices.recomputation(index), needed, counted)

        if free.config.inner != _CODED:
            found = search.run(room)
            index = last if found is None else found
            return told(index, search.peak(index))
        if last_first:
            smallest = code(last)
            found = search.run(room - (self.beside or 0)) if smallest <= room else None
            if found is not None and found < last and (peak := code(found)) <= room:
                return told(found, peak)
            return told(last, smallest)
        for _ in range(_MOST_TRIES):
            found = search.run(room - (self.beside or 0))
            if found is None:
                break
            if (peak := code(found)) <= room:
                return told(found, peak)
        predicted = search.peak(last) + (self.beside or 0)
        if self.beside is not None and predicted > _SURELY * room:
            return told(last, predicted, counted=False)
        return told(last, code(last))


def _needs(tried: tuple[Tried, Planned]) -> int:
    return tried[0].needed


class Bisection:
    """The search for the quickest of choices that fits, counting few of them.

    more: bytes that were counted beside the estimates, at the last trial. count: the bytes of one.
    """

    def __init__(
        self, choices: Frontier | JoinedChoices, more: int, count: Callable[[int], int]
    ) -> None:
        self.choices, self.more, self.count = choices, more, count
        self.counted: dict[int, int] = {}

    def run(self, budget: int) -> int | None:
        """The index of the quickest choice found to fit; None: there is none."""
        last = len(self.choices.estimates) - 1
        low, high = 0, last + 1
        for _ in range(_MOST_TRIALS):
            if low >= high:
                break
            found = self.choices.cheapest(budget - self.more)
            guess = max(low, min(high - 1, last + 1 if found is None else found))
            if self.peak(guess) <= budget:
                high = guess
            else:
                low = guess + 1
        if high <= last:
            return high
        # not reached, where trials ran out
        return last if low <= last and self.peak(last) <= budget else None

    def peak(self, index: int) -> int:
        """Bytes with the choice of an index, operator by operator."""
        if index not in self.counted:
            self.counted[index] = self.count(index)
        self.more = self.counted[index] - self.choices.estimates[index]
        return self.counted[index]


def _order(program: Program) -> list[str]:
    """The collectives of the data-parallel axes, as ranks that meet there must issue them."""
    axes = {axis.name for axis in data_axes(program.mesh.axes)}
    return [
        f"{one.phase} {one.op} {one.axis} {one.bytes} {one.change} {_parameters(one)}"
        for one in collectives_of(program)
        if one.axis in axes
    ]


def _parameters(one: Collective) -> list[str]:
    """The inputs of the graph that a collective gathers."""
    return sorted(node.name for node in inputs_of(one.node)) if one.op == "all_gather" else []


def _again(planned: Planned) -> str:
    return f"again {_operators(planned)}"


def chunk_as_first(planned: Planned, remembered: Remembered) -> Planned:
    """The plan with losses by chunks, or whole, as in the first graph of the same operators, where
    no budget is known: a loss by chunks gathers a weight once, and data-parallel ranks, which
    compile other lengths at other times, gather in one order."""
    first = remembered.setdefault(f"chunked {_operators(planned)}", planned.chunks)
    return planned if first == planned.chunks else planned.chunked(NEEDED if first else None)


def _operators(planned: Planned) -> str:
    """A hash of a graph's operators and their strategies, whatever its shapes."""
    strategies = planned.decisions.strategies
    return fingerprint(
        planned.serial, lambda node: strategy_text(strategies[node]) if node in strategies else ""
    )


def refuse_eager(budget: int, assumed: bool = False) -> None:
    """Raise, or warn of a budget that nobody asked for."""
    told = message(
        f"a memory budget of {budget:,} bytes a rank: inner='eager' computes nothing again in "
        "backward and keeps what autograd keeps, and the estimate of a step is not below half of "
        "the budget",
        remedy="Use inner='aot_eager' or 'inductor', or leave out the budget.",
    )
    if not assumed:
        raise ConfigError(told)
    warnings.warn(told, stacklevel=2)
