"""The cheapest plan at given prices: build the problem, solve it exactly, read it back."""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from autoshard.planning.asked import Request, charged_on_ep, constrain, keep_only, parts_on_ep
from autoshard.planning.chunked_loss import plan_losses
from autoshard.planning.cost import Machine
from autoshard.planning.decisions import Decisions
from autoshard.planning.head_tail import HeadTail
from autoshard.planning.mixtures import WEIGHTS
from autoshard.planning.one_axis.builder import builder_of
from autoshard.planning.prices import AxisPrices, Prices
from autoshard.planning.problem import Problem
from autoshard.planning.solver import Solution, TooWide
from autoshard.planning.values import output_state


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
    solution, held = _solved(problem)
    read = (*problem.read(solution), problem.output_states(solution))
    ordered = HeadTail(gm.graph, n, *read, request.contiguous_outputs)
    if ordered.unbalanced and not contiguous:  # which costs more than was thought
        return solve(gm, n, machine, request, prices, True)
    variables = len(problem.variables) + len(problem.copies)
    made = decided(ordered, problem, solution, variables, builder.prices, request, held)
    return replace(made, losses=plan_losses(gm, made, n, request.chunking))


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
    strategies = ordered.strategies
    stored = {node: output_state(strategies[node], None) for node in request.parameters}
    travelling = {
        stack
        for node, stacks in problem.stacks.items()
        if strategies[node].on_ep == WEIGHTS
        for stack, _ in stacks
    }
    prices.parts.update(parts_on_ep(strategies, problem, request.layout.experts))
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
        held=held,
        unbalanced=ordered.unbalanced,
        weights={
            node: prices.batch_choice(node, state, node in travelling)
            for node, state in stored.items()
            if prices.batch is not None
        },
        on_ep=charged_on_ep(strategies, stored, problem),
    )


def _solved(problem: Problem) -> tuple[Solution, list[fx.Node]]:
    """The cheapest assignment, and the nodes whose value or copy was not chosen by cost.

    Where a graph is too entangled for the exact elimination (a recurrence that is unrolled), the
    assignment is that of mini-buckets, with its gap; where they find none that is allowed, the
    values in the way are held, as a rule replicated, and the plan is the cheapest of the rest.
    """
    held: set[int] = set()
    while True:
        try:
            solution = problem.graph.solve()
        except TooWide as wide:
            if not held and (bounded := problem.graph.bounded()):
                return bounded, []
            for variable, allowed in wide.entangled.items():
                values = range(problem.graph.size(variable))
                keep_only(problem, variable, [i == allowed for i in values])
            held |= wide.entangled.keys()
        else:
            choices = (*problem.variables.items(), *problem.copies.items())
            return solution, list(dict.fromkeys(node for node, i in choices if i in held))
