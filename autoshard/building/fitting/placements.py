"""A program under a memory budget: the quickest choice with which its peak fits, as counted, of
what is kept, on the device or on the host, and what is computed again.

The planner's account of memory is an estimate; here the graphs that would run are made, and their
memory is counted (trials.py), for one placement after another, the quickest first.
"""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary

from autoshard.building.fitting.trials import Trials, Tried, counted, counted_part
from autoshard.building.planned import Planned, Unplanned
from autoshard.compiling import Collective, collectives_of
from autoshard.errors import ConfigError, PlanError, message
from autoshard.planning import Recomputation, strategy_text, target_name
from autoshard.planning.chunked_loss import NEEDED
from autoshard.planning.estimate import Layout, Training, footprint, held
from autoshard.program import Program
from autoshard.runtime.collectives import Axis, data_axes
from autoshard.runtime.parameters import is_planned

_SAFE = 2
"""An estimate this many times below the budget needs no count."""


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
            message(
                f"no plan fits a memory budget of {budget:,} bytes a rank: "
                f"{_AS_FIRST if bound else _ALL}, a step needs {needed:,} bytes, "
                f"{needed - budget:,} more",
                remedy=f"Raise the budget to {needed:,}, {longest}or use a smaller batch or more "
                "ranks.",
            )
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


def fit(
    asked: Unplanned,
    planned: Planned,
    build: Callable[[Planned], Program],
    budget: int,
    assumed: bool,
    inner: str,
    remembered: Remembered,
) -> Planned:
    """As `recompute`; `planned` is of what was asked. A budget that an error names was tried: other
    plans are candidates at it."""
    try:
        return recompute(planned, build, budget, assumed, inner, remembered)
    except BudgetTooSmall as small:
        told = small
    while True:
        other = asked.within(told.needed).plan()
        try:
            recompute(other, build, told.needed, assumed, inner, {})
        except BudgetTooSmall as larger:
            told = BudgetTooSmall(budget, larger.needed)
        else:
            raise told


def recompute(
    planned: Planned,
    build: Callable[[Planned], Program],
    budget: int,
    assumed: bool,
    inner: str,
    remembered: Remembered,
) -> Planned:
    """The plan whose step stays within `budget` bytes a rank, with what is computed again for that.

    build: makes the program of a plan for the first rank, whose parts are the largest: all ranks
    decide on the same one. assumed: nobody asked for the budget: where nothing fits it, what needs
    least is taken, with a warning; otherwise BudgetTooSmall is raised, and ConfigError where
    `inner`, the inner compiler, computes nothing again. remembered: what earlier graphs have
    decided, and where this one says it.
    """
    if inner == "eager":
        _say_that_all_is_kept(build(planned), budget, assumed)
        return planned
    candidates = [planned.decisions, *planned.decisions.others]
    # an estimate may be above what the graphs need
    default = planned.following(planned.decisions.unbudgeted or planned.decisions)
    default = default.recomputing(None).with_losses(fits=True)
    free = build(default)
    fits = _fits(free, budget)
    chunked = False
    if free.config.chunk_loss == "auto":
        chunked = not fits and default.with_losses(fits=False).chunks
        chunked = remembered.setdefault(f"chunked {_operators(free)}", chunked)
        default = default.with_losses(fits=not chunked)
    if fits or (chunked and _fits(build(default), budget)):
        if remembered.setdefault(_again(free), None) is None:
            return default
    trials, tried = Trials(budget), list[tuple[Tried, Planned]]()

    def fits_with(each: Planned, last_first: bool = False) -> bool:
        found = _decide(each, build, trials, last_first, remembered)
        tried.append((found, each.recomputing(found.chosen)))
        return found.needed <= budget

    for decisions in candidates:
        if fits_with(planned.following(decisions).with_losses(fits=not chunked)):
            return tried[-1][1]
    for _, each in sorted((one for one in tried if not one[0].counted), key=_needs):
        if fits_with(each, last_first=True):
            return tried[-1][1]
    (_, needed, _, bound), least = min((one for one in tried if one[0].counted), key=_needs)
    told = BudgetTooSmall(budget, needed, bound)
    if not assumed:
        raise told
    warnings.warn(str(told), stacklevel=2)
    return least


def _needs(tried: tuple[Tried, Planned]) -> int:
    return tried[0].needed


def _decide(
    planned: Planned,
    build: Callable[[Planned], Program],
    trials: Trials,
    last_first: bool,
    remembered: Remembered,
) -> Tried:
    """The choice for one placement: that of the first graph of its operators where it fits, or
    another with which collectives of the data-parallel axes have the same order. last_first: as in
    `Trials.quickest`."""
    budget = trials.budget

    def built(one: Recomputation | None) -> Program:
        return build(planned.recomputing(one))

    free = built(None)
    room, key = int(budget * counted_part(free.config.inner)), _again(free)
    before = 0 if _is_sure(free, budget) else counted(free)
    known, first = key in remembered, remembered.get(key)
    usual = free if first is None else built(first)
    needed = before if first is None else counted(usual)
    if needed <= room and (known or first is None):
        remembered.setdefault(key, first)
        return Tried(first, needed)
    found = trials.quickest(free, before, built, last_first)
    if known and found.needed <= budget and _order(built(found.chosen)) != _order(usual):
        return Tried(first, math.ceil(needed / counted_part(free.config.inner)) + 1, bound=True)
    if found.needed <= budget:
        remembered.setdefault(key, found.chosen)
    return found


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
    above, ready = dict.fromkeys([one.node]), [one.node] if one.op == "all_gather" else []
    while ready:
        new = [node for node in ready.pop().all_input_nodes if node not in above]
        above.update(dict.fromkeys(new))
        ready += new
    return sorted(node.name for node in above if node.op == "placeholder")


def _again(program: Program) -> str:
    return f"again {_operators(program)}"


def chunk_as_first(planned: Planned, remembered: Remembered) -> Planned:
    """The plan with losses by chunks, or whole, as in the first graph of the same operators, where
    no budget is known: a loss by chunks gathers a weight once, and data-parallel ranks, which
    compile other lengths at other times, gather in one order."""
    first = remembered.setdefault(f"chunked {_operators(planned)}", planned.chunks)
    return planned if first == planned.chunks else planned.chunked(NEEDED if first else None)


def _operators(program: Planned | Program) -> str:
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
        f"a memory budget of {budget:,} bytes a rank: inner='eager' computes nothing again in "
        "backward and keeps what autograd keeps, and the estimate of a step is not below half of "
        "the budget",
        remedy="Use inner='aot_eager' or 'inductor', or leave out the budget.",
    )
    if not assumed:
        raise ConfigError(told)
    warnings.warn(told, stacklevel=2)


def _is_sure(free: Program, budget: int) -> bool:
    """Whether the estimate of a step is so far below the budget that it needs no count."""
    kept = held(free.serial, free.decisions, free.parameters, free.axis.size)
    sizes = free.mesh.sizes
    layout = Layout.of(
        sizes, free.config.zero, free.config.bucket_bytes, free.config.defer_reduction
    )
    training = Training(states=free.config.optimizer_states)
    return _SAFE * footprint(kept, layout, training).total <= budget


def _fits(free: Program, budget: int) -> bool:
    """Whether a step stays within the budget as it is."""
    return _is_sure(free, budget) or counted(free) <= int(budget * counted_part(free.config.inner))
