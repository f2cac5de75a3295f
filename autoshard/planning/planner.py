"""Plan one captured graph on one mesh axis: build the problem, solve it exactly, read it back."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import fx

from autoshard.planning.asked import Request, constrain, keep_only
from autoshard.planning.batch_axis import batch_axis, least_charged, within_room
from autoshard.planning.cost import Hardware, planned_on
from autoshard.planning.decisions import Decisions
from autoshard.planning.estimate import (
    Profile,
    Training,
    footprint,
    frontier,
    profile,
    timing,
)
from autoshard.planning.head_tail import HeadTail
from autoshard.planning.kept_values import KeptSearch
from autoshard.planning.outer import Origin
from autoshard.planning.prices import AxisPrices, Prices
from autoshard.planning.problem import Builder, Problem
from autoshard.planning.solver import Solution, TooWide
from autoshard.planning.strategy import Strategy, value
from autoshard.planning.values import is_trained, shardable
from autoshard.runtime.collectives import I, State, shard_dim
from autoshard.runtime.errors import PlanError
from autoshard.runtime.graph_meta import DIFF, MUTATED, N_OUTPUTS

_SURE = 0.8
"""The part of a budget that an estimate may take without another plan being asked for."""

PlanPrice = TypeVar("PlanPrice")

_PLACEMENTS = 3
"""Prices of a byte at which placements are tried; at the highest a gigabyte costs a thousand
seconds a step."""


def plan_graph(gm: fx.GraphModule, n: int, hardware: Hardware, request: Request) -> Decisions:
    """The cheapest plan of `gm` on an axis of `n` ranks; with a `memory_budget`, of those that fit.

    Raises PlanError where a loaded plan asks for what the graph does not offer, and where no
    plan can fit `memory_budget` bytes a rank.
    """
    default = _default(gm, n, hardware, request)
    trains = is_trained(gm)
    if request.memory_budget is None or not (trains or request.budget_is_known):
        return default
    return _within_budget(gm, n, hardware, request, default, request.memory_budget)


def _default(gm: fx.GraphModule, n: int, hardware: Hardware, request: Request) -> Decisions:
    """The cheapest plan at the request's prices."""
    if not request.layout.chooses or request.outer is not None:  # two axes have one set of prices
        return _solve(gm, n, hardware, request, request.prices)
    return least_charged(
        lambda prices: _solve(gm, n, hardware, request, prices),
        _estimates(gm, n, request, sys.maxsize),
        request.prices,
        planned_on(hardware).efficiency.overlap,
    )


def _within_budget(
    gm: fx.GraphModule,
    n: int,
    hardware: Hardware,
    request: Request,
    default: Decisions,
    budget: int,
) -> Decisions:
    """The quickest plan that fits: placements at rising prices of a byte, each with the least
    recomputation with which it fits. What a plan needs is estimated as in `autoshard plan`."""
    found = [_priced(gm, n, default, request, budget)]
    if request.layout.chooses and request.outer is None and found[0].fits:
        best = within_room(
            lambda prices: _solve(gm, n, hardware, request, prices),
            _estimates(gm, n, request, budget),
            found[0],
            request.prices,
            list(request.parameters),
        )
        return best.decisions
    if n > 1 and not found[0].surely:

        def price(decisions: Decisions) -> _Priced:
            return _priced(gm, n, decisions, request, budget)

        found += map(price, at_dearer_bytes(gm, n, request, default))
        found += with_kept_values(gm, n, request, default, price, lambda one: one.least <= budget)
    # the quickest of those that fit; then those that are estimated to need least
    found.sort(
        key=lambda one: (one.least > budget, one.seconds if one.least <= budget else one.least)
    )
    best, chosen = found[0], found[0].decisions
    chosen.others = tuple(one.decisions for one in found[1:])
    chosen.unbudgeted = default
    if best.least <= budget:
        return chosen
    trains = is_trained(gm)
    if not request.budget_is_known:
        return chosen
    if not trains or best.resident > budget:
        raise PlanError(
            f"no plan fits memory_budget={budget:,} bytes a rank: the smallest found needs "
            f"{best.least:,} bytes, of which {best.resident:,} are parameters, gradients, "
            f"optimizer state and buffers, on {n} ranks of {request.axis}. Raise the budget, or "
            "use more ranks."
        )
    return chosen  # the estimate is on the safe side, and the graphs are counted


def at_dearer_bytes(
    gm: fx.GraphModule, n: int, request: Request, default: Decisions
) -> Iterator[Decisions]:
    """Plans at rising prices of a byte, for a rank that has less memory than `default` takes; the
    same for every layout whose weights have no choice."""
    hardware, low, high = default.hardware, default.prices.parameter_byte, 1e-6
    for step in range(1, _PLACEMENTS + 1):
        price = low * (high / low) ** (step / _PLACEMENTS)
        yield _solve(gm, n, hardware, request, _prices(price, hardware, request))


def with_kept_values(
    gm: fx.GraphModule,
    n: int,
    request: Request,
    default: Decisions,
    price: Callable[[Decisions], PlanPrice],
    fits: Callable[[PlanPrice], bool],
) -> Iterator[PlanPrice]:
    """Plans for such a rank whose placements and kept values are decided together, at the prices of
    a bisection.

    price: decides what each computes again, and leaves it in its `recomputation`; fits: whether it
    stays within the memory of a rank of `request.layout`.
    """
    hardware = default.hardware
    search = KeptSearch(gm, default, n, planned_on(hardware), request.layout.shard)
    return search.run(
        lambda prices: _solve(gm, n, hardware, request, prices, search=search), price, fits
    )


@dataclass(frozen=True)
class _Priced:
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


def _estimates(
    gm: fx.GraphModule, n: int, request: Request, budget: int
) -> Callable[[Decisions], _Priced]:
    """What estimates plans of one graph; of plans that differ in `weights` alone, the rest once."""
    made: dict[int, tuple[dict[fx.Node, Strategy], Profile]] = {}
    nodes = {name: node for node, name in request.parameters.items()}

    def estimate(decisions: Decisions) -> _Priced:
        strategies, chosen = decisions.strategies, decisions.weights
        if id(strategies) not in made:
            made[id(strategies)] = strategies, _profiled(gm, n, decisions, request)
        free = made[id(strategies)][1]
        weights = (replace(one, choice=chosen.get(nodes[one.name], "")) for one in free.weights)
        free = replace(free, weights=tuple(weights))
        return _priced(gm, n, decisions, request, budget, free)

    return estimate


def _profiled(gm: fx.GraphModule, n: int, decisions: Decisions, request: Request) -> Profile:
    cluster = planned_on(decisions.hardware)
    return profile(gm, decisions, request.parameters, n, cluster, request.layout.bucket_bytes)


def _priced(
    gm: fx.GraphModule,
    n: int,
    decisions: Decisions,
    request: Request,
    budget: int,
    free: Profile | None = None,
) -> _Priced:
    training, layout = Training(states=request.optimizer_states), request.layout
    cluster = planned_on(decisions.hardware)
    shard = layout.shard // (layout.outer * layout.experts)
    sizes = {"cp": layout.outer, "dp_shard": shard, "dp_replicate": layout.replicate}
    sizes["ep"] = layout.experts
    sizes[request.axis] = n
    free = free or _profiled(gm, n, decisions, request)
    held = footprint(free, layout, training)
    resident = held.parameters + held.gradients + held.optimizer + held.buffers
    of_weights = resident - held.buffers + held.buckets
    seconds = timing(free, layout, training, cluster, cluster.links(sizes)).step
    if held.total <= budget:
        surely = held.total <= _SURE * budget
        return _Priced(decisions, seconds, resident, held.total, True, surely, of_weights)
    choices = frontier(gm, decisions, n, cluster, host_memory=request.host_memory)
    beside = held.total - free.activations.saved
    least = min([held.total, *(beside + point.peak for point in choices.points[-1:])])
    index = choices.cheapest(budget - beside)
    if index is not None:
        decisions.recomputation = choices.recomputation(index)
        seconds += decisions.recomputation.seconds
    return _Priced(decisions, seconds, resident, least, False, False, of_weights)


def _prices(price: float, hardware: Hardware, request: Request) -> Prices:
    least = 2.0 / hardware.memory_bandwidth
    spreads = request.prices.spreads_batch
    return Prices(price, max(price, least), spreads_batch=spreads)


def _solve(
    gm: fx.GraphModule,
    n: int,
    hardware: Hardware,
    request: Request,
    prices: Prices,
    contiguous: bool = False,
    search: KeptSearch | None = None,
) -> Decisions:
    builder = builder_of(gm, n, hardware, request, prices, contiguous)
    problem = builder.build()
    if request.plan:
        constrain(gm, problem, request.plan)
    solution, held = _solved(problem) if search is None else search.solved(builder.prices, problem)
    read = (*problem.read(solution), problem.output_states(solution))
    ordered = HeadTail(gm.graph, n, *read, request.contiguous_outputs)
    if ordered.unbalanced and not contiguous:  # which costs more than was thought
        return _solve(gm, n, hardware, request, prices, True, search)
    variables = len(problem.variables) + len(problem.copies)
    return decided(ordered, problem, solution, variables, builder.prices, request, held)


def decided(
    ordered: HeadTail,
    problem: Problem,
    solution: Solution,
    variables: int,
    prices: AxisPrices,
    request: Request,
    held: list[fx.Node],
) -> Decisions:
    """The plan of an axis. problem: what the axis offers; solution: of it, or of one around it with
    so many `variables`. held: nodes that were not chosen by cost."""
    decisions = Decisions(
        strategies=ordered.strategies,
        copies=ordered.copies,
        stored={},
        outputs=ordered.outputs,
        offered=problem.domains,
        declined=problem.declined,
        seconds=solution.cost,
        variables=variables,
        width=solution.width,
        work=solution.work,
        prices=prices,
        held=held,
        unbalanced=ordered.unbalanced,
    )
    decisions.stored = {node: decisions.state(node) for node in request.parameters}
    if prices.batch is not None:
        stored = decisions.stored.items()
        decisions.weights = {node: prices.batch_choice(node, state) for node, state in stored}
    return decisions


def builder_of(
    gm: fx.GraphModule,
    n: int,
    hardware: Hardware,
    request: Request,
    prices: Prices,
    contiguous: bool = False,
    origin: Origin | None = None,
) -> Builder:
    """The builder of the problem that a request asks for. origin: in place of `request.outer`'s."""
    stored: dict[fx.Node, State | None] = {}
    wanted = request.plan.parameters if request.plan else {}
    for node, name in request.parameters.items():
        stored[node] = request.stored.get(node) or _checked(node, name, wanted.get(name))
    results = list(gm.graph.output_node().args[0])  # type: ignore[arg-type]
    domains = _output_domains(gm, results, n, request)
    axis = AxisPrices(
        n,
        hardware,
        stored.keys(),
        request.sequence_parallel,
        prices,
        request.axis,
        fusing=request.fusing,
        batch=batch_axis(n, hardware, request, prices.batch_second),
    )
    return Builder(
        gm,
        axis,
        stored=stored,
        arriving=request.arriving,
        output_domains=domains,
        outputs_read=request.outputs_read
        and not any(_is_loss(r) for r in results[: gm.meta[N_OUTPUTS]]),
        even=request.even,
        contiguous=contiguous,
        beside=request.beside,
        experts=request.layout.experts,
        origin=origin or (request.outer.origin(gm) if request.outer else None),
        splits_batch=request.splits_batch,
    )


def _solved(problem: Problem) -> tuple[Solution, list[fx.Node]]:
    """The cheapest assignment, and the nodes whose value or copy was not chosen by cost.

    Where a graph is too entangled for the exact minimum (a recurrence that is unrolled), the values
    in the way are held, as a rule replicated, and the plan is the cheapest of the rest.
    """
    held: set[int] = set()
    while True:
        try:
            solution = problem.graph.solve()
        except TooWide as wide:
            for variable, allowed in wide.entangled.items():
                values = range(problem.graph.size(variable))
                keep_only(problem, variable, [i == allowed for i in values])
            held |= wide.entangled.keys()
        else:
            choices = (*problem.variables.items(), *problem.copies.items())
            return solution, list(dict.fromkeys(node for node, i in choices if i in held))


def _checked(node: fx.Node, name: str, state: State | None) -> State | None:
    shape = tuple(value(node).shape)
    dim = shard_dim(state) if state else None
    if dim is not None and dim >= len(shape):
        raise PlanError(
            f"the plan stores parameter {name!r} as {state}, but its shape is {shape}: "
            f"use I (Replicate) or S(0) to S({len(shape) - 1})"
        )
    return state


def _is_loss(result: object) -> bool:
    """A differentiable scalar: beside it, other outputs are probably not read."""
    return (
        isinstance(result, fx.Node)
        and isinstance(value(result), torch.Tensor)
        and value(result).dim() == 0
        and bool(result.meta.get(DIFF))
    )


def may_be_sharded(gm: fx.GraphModule, i: int, result: object, request: Request) -> bool:
    """Whether output i may leave the graph as a shard."""
    if not request.lazy_outputs or i >= gm.meta[N_OUTPUTS] or not isinstance(result, fx.Node):
        return False
    return isinstance(value(result), torch.Tensor) and value(result).is_floating_point()


def _output_domains(
    gm: fx.GraphModule, results: list[object], n: int, request: Request
) -> list[list[State]]:
    """The states in which each output may leave: the user's free where they are lazy, what is
    written back to an input as it arrived."""
    domains = []
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    written = [request.arriving.get(placeholders[i], I) for i in gm.meta.get(MUTATED, ())]
    for i, result in enumerate(results):
        if may_be_sharded(gm, i, result, request):
            assert isinstance(result, fx.Node)
            domains.append([I, *shardable(value(result), n)])
        else:
            domains.append([I if i < gm.meta[N_OUTPUTS] else written[i - gm.meta[N_OUTPUTS]]])
    return domains
