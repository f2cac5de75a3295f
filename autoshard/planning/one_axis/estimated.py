"""What a step of a plan takes and holds, by the estimate of `autoshard plan`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import fx

from autoshard.planning.asked import Request
from autoshard.planning.decisions import Decisions
from autoshard.planning.estimate import Profile, footprint, frontier, profile, timing
from autoshard.planning.strategy import Strategy

_SURE = 0.8
"""The part of a budget that an estimate may take without another plan being asked for."""


@dataclass(frozen=True)
class PlanEstimate:
    """A plan with its recomputation. resident: bytes that are there whatever runs. least: bytes
    with all recomputed that helps. fits, surely: whether it fits without, and by far. held: bytes
    of weights, of what trains them and of their buckets."""

    decisions: Decisions
    seconds: float
    resident: int
    least: int
    fits: bool
    surely: bool
    held: int


def estimates(
    gm: fx.GraphModule, n: int, request: Request, budget: int
) -> Callable[[Decisions], PlanEstimate]:
    """What estimates plans of one graph; of plans that differ in `weights` alone, the rest once."""
    made: dict[int, tuple[dict[fx.Node, Strategy], Profile]] = {}
    nodes = {name: node for node, name in request.parameters.items()}

    def estimate(decisions: Decisions) -> PlanEstimate:
        strategies, chosen = decisions.strategies, decisions.weights
        if id(strategies) not in made:
            made[id(strategies)] = strategies, _profiled(gm, n, decisions, request)
        free = made[id(strategies)][1]
        weights = (replace(one, choice=chosen.get(nodes[one.name], "")) for one in free.weights)
        free = replace(free, weights=tuple(weights))
        return priced(gm, n, decisions, request, budget, free)

    return estimate


def _profiled(gm: fx.GraphModule, n: int, decisions: Decisions, request: Request) -> Profile:
    bucket_bytes, training = request.layout.bucket_bytes, request.training
    return profile(gm, decisions, request.parameters, n, decisions.machine, bucket_bytes, training)


def priced(
    gm: fx.GraphModule,
    n: int,
    decisions: Decisions,
    request: Request,
    budget: int,
    free: Profile | None = None,
) -> PlanEstimate:
    training, layout = request.training, request.layout
    machine = decisions.machine
    free = free or _profiled(gm, n, decisions, request)
    held = footprint(free, layout, training)
    resident = held.parameters + held.gradients + held.optimizer + held.buffers
    of_weights = resident - held.buffers + held.buckets
    seconds = timing(free, layout, training, machine).step
    if held.total <= budget:
        surely = held.total <= _SURE * budget
        return PlanEstimate(decisions, seconds, resident, held.total, True, surely, of_weights)
    choices = frontier(gm, decisions, n, machine, host_memory=request.host_memory)
    beside = held.total - free.activations.saved
    least = min([held.total, *(beside + point.peak for point in choices.points[-1:])])
    index = choices.cheapest(budget - beside)
    if index is not None:
        chosen = choices.recomputation(index)
        decisions = replace(decisions, recomputation=chosen)
        seconds += chosen.seconds
    return PlanEstimate(decisions, seconds, resident, least, False, False, of_weights)
