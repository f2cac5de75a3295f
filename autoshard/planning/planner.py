"""Plan one captured graph on one mesh axis: build the problem, solve it exactly, read it back."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import fx

from autoshard.planning.cost import Fusing, Hardware, planned_on
from autoshard.planning.decisions import Decisions
from autoshard.planning.estimate import (
    Layout,
    Training,
    footprint,
    frontier,
    profile,
    timing,
)
from autoshard.planning.head_tail import HeadTail, in_plain_order
from autoshard.planning.kept_values import KeptSearch
from autoshard.planning.operators import target_name
from autoshard.planning.outer import Origin, Outer
from autoshard.planning.plan import Plan, strategy_text
from autoshard.planning.prices import AxisPrices, Prices
from autoshard.planning.problem import Builder, Problem
from autoshard.planning.solver import Solution, TooWide
from autoshard.planning.strategy import value
from autoshard.planning.values import differentiable, shardable
from autoshard.runtime.collectives import I, State, shard_dim
from autoshard.runtime.errors import PlanError
from autoshard.runtime.graph_meta import DIFF, MUTATED, N_OUTPUTS

_SURE = 0.8
"""The part of a budget that an estimate may take without another plan being asked for."""

_PLACEMENTS = 3
"""Prices of a byte at which placements are tried; at the highest a gigabyte costs a thousand
seconds a step."""


@dataclass(kw_only=True)
class Request:
    """What the planner is asked.

    axis: name of the axis, tp or cp. parameters: name of each parameter placeholder.
    stored: the state in which a parameter is stored already; one without an entry is free.
    arriving: the state of an input that comes back from an earlier call as a shard.
    contiguous_outputs: whether a sharded output is contiguous (a DTensor).
    outputs_read: whether a sharded output costs its gather; beside a loss it never does.
    budget_is_known: whether it is an error that nothing fits it; else the default plan is taken.
    prices: what a stored byte costs where there is no memory_budget. layout: the data-parallel
    axes, among which a rank's bytes are split further. even: whether only dims are split that the
    axis divides, and no shape depends on values (of a graph that is exported, or is planned on
    another axis afterwards). beside: ranks of that axis. fusing: which collectives are one operator
    with the products beside them; None: none. outer: of the graph of a rank of another axis, the
    plan of that.
    """

    parameters: Mapping[fx.Node, str]
    axis: str = "tp"
    stored: Mapping[fx.Node, State] = field(default_factory=dict)
    arriving: Mapping[fx.Node, State] = field(default_factory=dict)
    sequence_parallel: bool = True
    lazy_outputs: bool = True
    contiguous_outputs: bool = False
    outputs_read: bool = True
    memory_budget: int | None = None
    budget_is_known: bool = True
    host_memory: int | None = None
    plan: Plan | None = None
    prices: Prices = field(default_factory=Prices)
    layout: Layout = field(default_factory=Layout)
    even: bool = False
    beside: int = 1
    outer: Outer | None = None
    fusing: Fusing | None = None


def fingerprint(gm: fx.GraphModule) -> str:
    """Names, operators and shapes of a graph: equal on every rank that captured the same one."""
    text = hashlib.sha256()
    for node in gm.graph.nodes:
        val = value(node)
        shape = tuple(str(e) for e in val.shape) if isinstance(val, torch.Tensor) else ()
        text.update(f"{node.op} {node.name} {target_name(node)} {shape}\n".encode())
    return text.hexdigest()[:16]


def plan_graph(gm: fx.GraphModule, n: int, hardware: Hardware, request: Request) -> Decisions:
    """The cheapest plan of `gm` on an axis of `n` ranks; with a `memory_budget`, of those that fit.

    Raises PlanError where a loaded plan asks for what the graph does not offer, and where no
    plan can fit `memory_budget` bytes a rank.
    """
    default = _solve(gm, n, hardware, request, request.prices)
    trains = any(differentiable(node) for node in gm.graph.nodes)
    if request.memory_budget is None or not (trains or request.budget_is_known):
        return default
    return _within_budget(gm, n, hardware, request, default, request.memory_budget)


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
    if n > 1 and not found[0].surely:
        low, high = default.prices.parameter_byte, 1e-6
        for step in range(1, _PLACEMENTS + 1):
            price = low * (high / low) ** (step / _PLACEMENTS)
            decisions = _solve(gm, n, hardware, request, _prices(price, hardware))
            found.append(_priced(gm, n, decisions, request, budget))
        found += _jointly(gm, n, default, request, budget)
    # the quickest of those that fit; then those that are estimated to need least
    found.sort(
        key=lambda one: (one.least > budget, one.seconds if one.least <= budget else one.least)
    )
    best, chosen = found[0], found[0].decisions
    chosen.others = tuple(one.decisions for one in found[1:])
    chosen.unbudgeted = default
    if best.least <= budget:
        return chosen
    trains = any(differentiable(node) for node in gm.graph.nodes)
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


def _jointly(
    gm: fx.GraphModule, n: int, default: Decisions, request: Request, budget: int
) -> Iterator[_Priced]:
    """Placements and what is kept, decided together, at the prices of a bisection."""
    hardware = default.hardware
    search = KeptSearch(gm, default, n, planned_on(hardware), request.layout.shard)
    return search.run(
        lambda prices: _solve(gm, n, hardware, request, prices, search=search),
        lambda decisions: _priced(gm, n, decisions, request, budget),
        lambda one: one.least <= budget,
    )


@dataclass(frozen=True)
class _Priced:
    """A plan with its recomputation. resident: bytes that are there whatever runs. least: bytes
    with all recomputed that helps. surely: whether it fits without, by far."""

    decisions: Decisions
    seconds: float
    resident: int
    least: int
    surely: bool


def _priced(
    gm: fx.GraphModule, n: int, decisions: Decisions, request: Request, budget: int
) -> _Priced:
    training, layout, cluster = Training(), request.layout, planned_on(decisions.hardware)
    shard = layout.shard // (layout.outer * layout.experts)
    sizes = {"cp": layout.outer, "dp_shard": shard, "dp_replicate": layout.replicate}
    sizes["ep"] = layout.experts
    sizes[request.axis] = n
    free = profile(gm, decisions, request.parameters, n, cluster, layout.bucket_bytes)
    held = footprint(free, layout, training)
    resident = held.parameters + held.gradients + held.optimizer + held.buffers
    seconds = timing(free, layout, training, cluster, cluster.links(sizes)).step
    if held.total <= budget:
        return _Priced(decisions, seconds, resident, held.total, held.total <= _SURE * budget)
    choices = frontier(gm, decisions, n, cluster, host_memory=request.host_memory)
    beside = held.total - free.activations.saved
    least = min([held.total, *(beside + point.peak for point in choices.points[-1:])])
    index = choices.cheapest(budget - beside)
    if index is not None:
        decisions.recomputation = choices.recomputation(index)
        seconds += decisions.recomputation.seconds
    return _Priced(decisions, seconds, resident, least, False)


def _prices(price: float, hardware: Hardware) -> Prices:
    return Prices(price, max(price, 2.0 / hardware.memory_bandwidth))


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
        _constrain(gm, problem, request.plan)
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
                _keep(problem, variable, [i == allowed for i in values])
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


def _constrain(gm: fx.GraphModule, problem: Problem, plan: Plan) -> None:
    """Leave only what a loaded plan names for this graph."""
    graph = plan.graphs.get(fingerprint(gm))
    if graph is None:
        return
    by_name = {node.name: node for node in gm.graph.nodes}
    for name, text in graph.nodes.items():
        node = by_name.get(name)
        domain = problem.domains.get(node, []) if node else []
        texts, text = [strategy_text(s) for s in domain], in_plain_order(text)
        if text not in texts:
            raise PlanError(
                f"the plan runs node {name!r} as {text!r}, which is not possible there. "
                f"Possible: {texts or 'nothing (no such node)'}. Correct the line, or delete it."
            )
        assert node is not None
        _keep(problem, problem.variables[node], [t == text for t in texts])
    for name, state in graph.copies.items():
        node = by_name.get(name)
        states = problem.copy_domains.get(node, []) if node else []
        state = in_plain_order(state)
        if state not in states:
            raise PlanError(
                f"the plan keeps the shared copy of {name!r} in {state!r}; possible: {states}"
            )
        assert node is not None
        _keep(problem, problem.copies[node], [s == state for s in states])


def _keep(problem: Problem, variable: int, allowed: list[bool]) -> None:
    problem.graph.add((variable,), np.where(np.array(allowed), 0.0, np.inf))


def with_graph(
    plan: Plan | None, decisions: Decisions, request: Request, gm: fx.GraphModule, n: int
) -> Plan:
    """`plan` with this graph's decisions added."""
    base = plan or Plan(request.axis, n)
    parameters = dict(base.parameters)
    parameters.update({name: decisions.stored[node] for node, name in request.parameters.items()})
    graphs = {**base.graphs, fingerprint(gm): decisions.graph_plan()}
    return replace(base, parameters=parameters, graphs=graphs)
