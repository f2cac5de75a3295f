"""The plan of one captured graph on one mesh axis: the cheapest at given prices, solved exactly and
read back, or, under a budget, the quickest of those that the estimate of `autoshard plan` fits.

Gathers and reductions of weights run beside the compute, and only what outlasts it is waited for:
whether a second of them costs a second or next to nothing is a property of the whole step, not of
one weight. So where dp_shard has a choice for each weight the problem is solved for both, exactly
each time, and the estimate of the step, which knows what overlaps, decides between the plans (as
with transfers to the host).
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
from torch import fx

from autoshard.planning.chunked_loss import plan_losses
from autoshard.planning.context_parallel import HeadTail, in_plain_order
from autoshard.planning.cost import Machine
from autoshard.planning.decisions import Decisions
from autoshard.planning.estimate import Profile, footprint, frontier, profile, timing
from autoshard.planning.mixtures import ROWS, WEIGHTS, stacks_by
from autoshard.planning.plan import Plan, strategy_text, without_ep
from autoshard.planning.prices import AxisPrices, Prices
from autoshard.planning.problem import Problem
from autoshard.planning.search.asked import Request, builder_of, chooses_on_ep, fingerprint
from autoshard.planning.solver import Solution, TooWide
from autoshard.planning.strategy import Strategy
from autoshard.planning.values import is_trained, output_state
from autoshard.runtime.collectives import ONCE, TWICE, State
from autoshard.runtime.errors import PlanError

_SURE = 0.8
"""The part of a budget that an estimate may take without another plan being asked for."""

_PLACEMENTS, _HIGHEST = 3, 1e-6
"""Prices of a byte at which placements are tried; at the highest a gigabyte costs a thousand
seconds a step."""

_CHEAPER, _LEAST_PRICE = 4, 1e-13
"""Prices of a byte below the default at which plans are tried where memory is left."""


def solve(
    gm: fx.GraphModule,
    n: int,
    machine: Machine,
    request: Request,
    prices: Prices,
    contiguous: bool = False,
) -> Decisions:
    """The cheapest plan at given prices. contiguous: as of `Builder`. Raises PlanError where the
    graph does not offer what a plan file says."""
    builder = builder_of(gm, n, machine, request, prices, contiguous)
    problem = builder.build()
    if request.plan:
        constrain(gm, problem, request.plan)
    solution = _solved(problem)
    read = (*problem.read(solution), problem.output_states(solution))
    ordered = HeadTail(gm.graph, n, *read, request.contiguous_outputs)
    if ordered.unbalanced and not contiguous:  # which costs more than was thought
        return solve(gm, n, machine, request, prices, True)
    variables = len(problem.variables) + len(problem.copies)
    made = decided(ordered, problem, solution, variables, builder.prices, request)
    return replace(made, losses=plan_losses(gm, made.strategies, n, request.chunking))


def decided(
    ordered: HeadTail,
    problem: Problem,
    solution: Solution,
    variables: int,
    prices: AxisPrices,
    request: Request,
) -> Decisions:
    """The plan of an axis. problem: what the axis offers; solution: of it, or of one around it with
    so many `variables`."""
    strategies = ordered.strategies
    stored = {node: output_state(strategies[node], None) for node in request.parameters}
    travelling = stacks_by(strategies, WEIGHTS)
    # where rows travel to them, a rank of ep uses its part of a stack
    prices.parts.update(dict.fromkeys(stacks_by(strategies, ROWS), request.layout.experts))
    return Decisions(
        strategies=strategies,
        copies=ordered.copies,
        stored=stored,
        outputs=ordered.outputs,
        offered=problem.domains,
        declined=problem.declined,
        seconds=solution.cost,
        variables=variables,
        width=solution.width,
        work=solution.work,
        gap=solution.gap,
        prices=prices,
        unbalanced=ordered.unbalanced,
        weights={
            node: prices.batch_choice(node, state, node in travelling)
            for node, state in stored.items()
            if prices.batch is not None
        },
        on_ep=charged_on_ep(strategies, stored, problem),
    )


def charged_on_ep(
    strategies: Mapping[fx.Node, Strategy], stored: Mapping[fx.Node, State], problem: Problem
) -> dict[fx.Node, dict[str, float]]:
    """What each mixture with a choice on ep is charged for either, beside what it costs with all
    experts at hand. strategies, stored: that were chosen."""
    charged = {}
    for node, stacks in problem.stacks.items():
        chosen, found = strategies[node], dict[str, float]()
        own = problem.graph.unary[problem.variables[node]]
        domain = problem.domains[node]
        whole = chosen._replace(on_ep=WEIGHTS)
        plain = own[domain.index(whole)] if whole in domain else 0.0
        for i, one in enumerate(domain):
            if one._replace(on_ep=chosen.on_ep) == chosen:
                found[one.on_ep] = float(own[i] - plain)
                for stack, table in stacks:
                    states = [each.output for each in problem.domains[stack]]
                    found[one.on_ep] += float(table[states.index(stored[stack]), i])
        if WEIGHTS in found and ROWS in found:
            charged[node] = found
    return charged


def constrain(gm: fx.GraphModule, problem: Problem, plan: Plan) -> None:
    """Leave only what a loaded plan names for this graph."""
    graph = plan.graphs.get(fingerprint(gm))
    if graph is None:
        return
    by_name = {node.name: node for node in gm.graph.nodes}
    for name, text in graph.nodes.items():
        node = by_name.get(name)
        domain = problem.domains.get(node, []) if node else []
        texts, text = [strategy_text(s) for s in domain], in_plain_order(text)
        if not any(one.on_ep for one in domain):  # of another mesh
            text = without_ep(text)
        elif text == without_ep(text):  # which leaves that open
            texts = [without_ep(one) for one in texts]
        if text not in texts:
            raise PlanError(
                f"the plan runs node {name!r} as {text!r}, which is not possible there. "
                f"Possible: {texts or 'nothing (no such node)'}. Correct the line, or delete it."
            )
        assert node is not None
        keep_only(problem, problem.variables[node], [t == text for t in texts])
    for name, state in graph.copies.items():
        node = by_name.get(name)
        states = problem.copy_domains.get(node, []) if node else []
        state = in_plain_order(state)
        if state not in states:
            raise PlanError(
                f"the plan keeps the shared copy of {name!r} in {state!r}; possible: {states}"
            )
        assert node is not None
        keep_only(problem, problem.copies[node], [s == state for s in states])


def keep_only(problem: Problem, variable: int, allowed: list[bool]) -> None:
    """Leave only the allowed values of a variable."""
    problem.graph.add((variable,), np.where(np.array(allowed), 0.0, np.inf))


def _solved(problem: Problem) -> Solution:
    """The cheapest assignment; where a graph is too entangled for the exact elimination (a
    recurrence that is unrolled), that of mini-buckets, with its gap."""
    try:
        return problem.graph.solve()
    except TooWide:
        if (bounded := problem.graph.bounded()) is None:
            raise
        return bounded


def at_dearer_bytes(
    gm: fx.GraphModule, n: int, request: Request, default: Decisions
) -> Iterator[Decisions]:
    """Plans at rising prices of a byte, for a rank that has less memory than `default` takes; the
    same for every layout whose weights have no choice."""
    machine = default.machine
    for price in dearer(default.prices.parameter_byte):
        yield solve(gm, n, machine, request, of_a_byte(price, machine))


def dearer(byte: float) -> Iterator[float]:
    """Rising prices of a byte, above that without a budget."""
    for step in range(1, _PLACEMENTS + 1):
        yield byte * (_HIGHEST / byte) ** (step / _PLACEMENTS)


def of_a_byte(price: float, machine: Machine) -> Prices:
    """The prices at which a stored byte costs so much, and one that passes through memory no
    less."""
    least = 2.0 / machine.device.memory_bandwidth
    return Prices(price, max(price, least))


@dataclass(frozen=True)
class PlanEstimate:
    """A plan with its recomputation, and what the estimate says of a step. resident: bytes that are
    there whatever runs. least: bytes with all recomputed that helps. fits: whether it fits without.
    held: bytes of weights, of what trains them and of their buckets."""

    decisions: Decisions
    seconds: float
    resident: int
    least: int
    fits: bool
    held: int


def estimates(
    gm: fx.GraphModule, n: int, request: Request, budget: int
) -> Callable[[Decisions], PlanEstimate]:
    """What estimates plans of one graph; of plans that differ in `weights` alone, the rest once."""
    made: dict[int, tuple[dict[fx.Node, Strategy], Profile]] = {}
    nodes = {name: node for node, name in request.parameters.items()}
    layout, training = request.layout, request.training

    def estimate(decisions: Decisions) -> PlanEstimate:
        machine, strategies = decisions.machine, decisions.strategies
        if id(strategies) not in made:
            graph = (gm, decisions, request.parameters)
            found = profile(*graph, n, machine, layout.bucket_bytes, training)
            made[id(strategies)] = strategies, found
        free, chosen = made[id(strategies)][1], decisions.weights
        weights = (replace(one, choice=chosen.get(nodes[one.name], "")) for one in free.weights)
        free = replace(free, weights=tuple(weights))
        held = footprint(free, layout, training)
        resident = held.parameters + held.gradients + held.optimizer + held.buffers
        of_weights = resident - held.buffers + held.buckets
        seconds = timing(free, layout, training, machine).step
        if held.total <= budget:
            return PlanEstimate(decisions, seconds, resident, held.total, True, of_weights)
        choices = frontier(gm, decisions, n, machine, host_memory=request.host_memory)
        beside = held.total - free.activations.saved
        least = min([held.total, *(beside + point.peak for point in choices.points[-1:])])
        index = choices.cheapest(budget - beside)
        if index is not None:
            again = choices.recomputation(index)
            decisions = replace(decisions, recomputation=again)
            seconds += again.seconds
        return PlanEstimate(decisions, seconds, resident, least, False, of_weights)

    return estimate


def plan_graph(gm: fx.GraphModule, n: int, machine: Machine, request: Request) -> Decisions:
    """The cheapest plan of `gm` on an axis of `n` ranks; with a `memory_budget`, of those that fit.

    Raises PlanError where a loaded plan asks for what the graph does not offer, and where no
    plan can fit `memory_budget` bytes a rank.
    """
    default, budget = _cheapest(gm, n, machine, request), request.memory_budget
    if budget is None or not (is_trained(gm) or request.budget_is_known):
        return default
    return _within_budget(gm, n, machine, request, default, budget)


def _cheapest(gm: fx.GraphModule, n: int, machine: Machine, request: Request) -> Decisions:
    """The plan whose step and bytes, at the planner's price, are estimated to cost least: of that
    which charges data-parallel communication whole, and, where weights or experts have a choice,
    that which charges what it takes of the compute that hides it."""
    seen = solve(gm, n, machine, request, request.prices)
    layout, trains = request.layout, is_trained(gm)
    chooses = layout.chooses or (trains and chooses_on_ep(gm, n, machine, request))
    if not chooses or layout.staged:  # beside pp no compute hides what weights send
        return seen
    beside = replace(request.prices, batch_second=1 - machine.efficiency.overlap)
    hidden = solve(gm, n, machine, request, beside)
    if _same(seen, hidden):
        return seen
    hidden, price = replace(hidden, charged=seen.seconds), seen.prices.parameter_byte
    both = map(estimates(gm, n, request, sys.maxsize), (seen, hidden))
    return min(both, key=lambda one: one.seconds + price * one.held).decisions


def _within_room(
    gm: fx.GraphModule,
    n: int,
    machine: Machine,
    request: Request,
    default: PlanEstimate,
    budget: int,
) -> PlanEstimate:
    """The quickest plan that fits, where the default one does: at cheaper bytes, and with weights
    kept that would be gathered again, those first that the forward reads last."""
    best, before = default, [default.decisions]
    estimate, byte = estimates(gm, n, request, budget), best.decisions.prices.parameter_byte
    for step in range(1, _CHEAPER + 1):
        price = byte * (_LEAST_PRICE / byte) ** (step / _CHEAPER)
        made = solve(gm, n, machine, request, replace(request.prices, parameter_byte=price))
        made = replace(made, charged=default.decisions.compared)
        if not any(_same(made, one) for one in before):
            before.append(made)
            one = estimate(made)
            best = one if one.fits and one.seconds < best.seconds else best
    # all weights have one ratio of seconds to bytes, so that a price takes all of them or none
    weights = best.decisions.weights
    twice = [node for node in reversed(list(request.parameters)) if weights.get(node) == TWICE]
    low, high, found = 0, len(twice), best  # so many fit; more than so many do not
    while low < high:
        count = (low + high + 1) // 2
        kept = dict.fromkeys(twice[:count], ONCE)
        one = estimate(replace(best.decisions, weights={**weights, **kept}))
        if not one.fits:
            high = count - 1
            continue
        low = count
        found = one if one.seconds < found.seconds else found
    return found


def _same(one: Decisions, other: Decisions) -> bool:
    return one.weights == other.weights and one.strategies == other.strategies


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
    found = [estimates(gm, n, request, budget)(default)]
    if not found[0].fits and request.chunking != request.chunking_to_fit:
        request = replace(request, chunking=request.chunking_to_fit)
        default = replace(default, losses=plan_losses(gm, default.strategies, n, request.chunking))
        found = [estimates(gm, n, request, budget)(default)]
    if request.layout.chooses and found[0].fits:
        return _within_room(gm, n, machine, request, found[0], budget).decisions
    if n > 1 and not (found[0].fits and found[0].least <= _SURE * budget):
        dearer = at_dearer_bytes(gm, n, request, default)
        found += map(estimates(gm, n, request, budget), dearer)
    decided = [replace(one.decisions, charged=default.compared) for one in found]
    found = [replace(one, decisions=each) for one, each in zip(found, decided)]
    # the quickest of those that fit; then those that are estimated to need least
    found.sort(
        key=lambda one: (one.least > budget, one.seconds if one.least <= budget else one.least)
    )
    best, others = found[0], tuple(one.decisions for one in found[1:])
    chosen = replace(best.decisions, others=others, unbudgeted=decided[0])
    if best.least <= budget or not request.budget_is_known:
        return chosen
    if not is_trained(gm) or best.resident > budget:
        ranks = f" on {n} ranks of {request.axis}" if n > 1 else ""
        raise PlanError(
            f"no plan fits a memory budget of {budget:,} bytes a rank{ranks}: parameters, "
            f"gradients, optimizer state and buffers take {best.resident:,}, and a step about "
            f"{best.least:,}. Raise the budget, or use more ranks."
        )
    return chosen  # the estimate is on the safe side, and the graphs are counted
