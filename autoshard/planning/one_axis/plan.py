"""The plan of one captured graph on one mesh axis: the cheapest, or of those that fit a budget."""

from __future__ import annotations

import sys
from dataclasses import replace

from torch import fx

from autoshard.planning.asked import Request, chooses_on_ep
from autoshard.planning.batch_axis import least_charged, within_room
from autoshard.planning.chunked_loss import plan_losses
from autoshard.planning.cost import Machine
from autoshard.planning.decisions import Decisions
from autoshard.planning.one_axis.candidates import at_dearer_bytes
from autoshard.planning.one_axis.estimated import estimates, priced
from autoshard.planning.one_axis.solution import solve
from autoshard.planning.values import is_trained
from autoshard.runtime.errors import PlanError


def plan_graph(gm: fx.GraphModule, n: int, machine: Machine, request: Request) -> Decisions:
    """The cheapest plan of `gm` on an axis of `n` ranks; with a `memory_budget`, of those that fit.

    Raises PlanError where a loaded plan asks for what the graph does not offer, and where no
    plan can fit `memory_budget` bytes a rank.
    """
    default = _cheapest(gm, n, machine, request)
    trains = is_trained(gm)
    if request.memory_budget is None or not (trains or request.budget_is_known):
        return default
    return _within_budget(gm, n, machine, request, default, request.memory_budget)


def _cheapest(gm: fx.GraphModule, n: int, machine: Machine, request: Request) -> Decisions:
    """The cheapest plan at the request's prices."""
    layout, trains = request.layout, is_trained(gm)
    chooses = layout.chooses or (trains and chooses_on_ep(gm, n, machine, request))
    if not chooses or layout.staged:  # beside pp no compute hides what weights send
        return solve(gm, n, machine, request, request.prices)
    return least_charged(
        lambda prices: solve(gm, n, machine, request, prices),
        estimates(gm, n, request, sys.maxsize),
        request.prices,
        machine.efficiency.overlap,
    )


def _within_budget(
    gm: fx.GraphModule,
    n: int,
    machine: Machine,
    request: Request,
    default: Decisions,
    budget: int,
) -> Decisions:
    """The quickest plan that fits: placements at rising prices of a byte, each with the least
    recomputation with which it fits. What a plan needs is estimated as in `autoshard plan`."""
    found = [priced(gm, n, default, request, budget)]
    if not found[0].fits and request.chunking != request.chunking_to_fit:
        request = replace(request, chunking=request.chunking_to_fit)
        default = replace(default, losses=plan_losses(gm, default, n, request.chunking))
        found = [priced(gm, n, default, request, budget)]
    if request.layout.chooses and found[0].fits:
        best = within_room(
            lambda prices: solve(gm, n, machine, request, prices),
            estimates(gm, n, request, budget),
            found[0],
            request.prices,
            list(request.parameters),
        )
        return best.decisions
    if n > 1 and not found[0].surely:
        dearer = at_dearer_bytes(gm, n, request, default)
        found += [priced(gm, n, one, request, budget) for one in dearer]
    decided = [replace(one.decisions, charged=default.compared) for one in found]
    found = [replace(one, decisions=each) for one, each in zip(found, decided)]
    # the quickest of those that fit; then those that are estimated to need least
    found.sort(
        key=lambda one: (one.least > budget, one.seconds if one.least <= budget else one.least)
    )
    best, others = found[0], tuple(one.decisions for one in found[1:])
    chosen = replace(best.decisions, others=others, unbudgeted=decided[0])
    if best.least <= budget:
        return chosen
    trains = is_trained(gm)
    if not request.budget_is_known:
        return chosen
    if not trains or best.resident > budget:
        ranks = f" on {n} ranks of {request.axis}" if n > 1 else ""
        raise PlanError(
            f"no plan fits a memory budget of {budget:,} bytes a rank{ranks}: parameters, "
            f"gradients, optimizer state and buffers take {best.resident:,}, and a step about "
            f"{best.least:,}. Raise the budget, or use more ranks."
        )
    return chosen  # the estimate is on the safe side, and the graphs are counted
