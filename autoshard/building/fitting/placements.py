"""A program under a memory budget: the quickest choice with which its peak fits, as counted, of
what is kept, on the device or on the host, and what is computed again.

The planner's account of memory is an estimate; here the graphs that would run are made, and their
memory is counted (trials.py), for one placement after another, the quickest first.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable
from typing import Protocol

from torch import fx

from autoshard.building.fitting.trials import Trials, Tried, counted, counted_part
from autoshard.errors import ConfigError, PlanError, message
from autoshard.planning import Decisions, Recomputation, strategy_text, target_name
from autoshard.planning.chunked_loss import NEEDED, plan_losses
from autoshard.planning.estimate import Layout, Training, footprint, held
from autoshard.program import Program
from autoshard.runtime.collectives import data_axes

_SAFE = 2
"""An estimate this many times below the budget needs no count."""


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
    trials, tried = Trials(budget), list[tuple[Tried, Decisions]]()

    def fits_with(each: Decisions, last_first: bool = False) -> bool:
        planned.take(each)
        planned.plan_losses(each, fits=not chunked)
        tried.append((_decide(each, build, trials, last_first), each))
        return tried[-1][0].needed <= budget

    if any(map(fits_with, candidates)):
        return
    passed_over = sorted((one for one in tried if not one[0].counted), key=_needs)
    if any(fits_with(each, last_first=True) for _, each in passed_over):
        return
    (found, needed, _), least = min((one for one in tried if one[0].counted), key=_needs)
    told = BudgetTooSmall(budget, needed)
    if not assumed:
        raise told
    warnings.warn(str(told), stacklevel=2)
    planned.take(least)
    least.recomputation = found


def _needs(tried: tuple[Tried, Decisions]) -> int:
    return tried[0].needed


def _decide(
    decisions: Decisions, build: Callable[[], Program], trials: Trials, last_first: bool
) -> Tried:
    """The choice for one placement, which it gets. last_first: as in `Trials.quickest`."""
    decisions.recomputation, budget = None, trials.budget
    free = build()
    before = 0 if _is_sure(free, budget) else counted(free)
    if before <= int(budget * counted_part(free.config.inner)):
        return Tried(None, 0)
    key = (_operators(free), budget)
    shared = bool(data_axes(free.mesh.axes))
    if shared and key in _decided:
        # data-parallel ranks compile other lengths at other times, and gather in one order
        decisions.recomputation = _decided[key]
        return Tried(decisions.recomputation, budget)

    def chosen(one: Recomputation) -> Program:
        decisions.recomputation = one
        return build()

    found = trials.quickest(free, before, chosen, last_first)
    decisions.recomputation = found.chosen
    if shared and found.needed <= budget:
        _decided[key] = found.chosen
    return found


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
    return _is_sure(free, budget) or counted(free) <= int(budget * counted_part(free.config.inner))
