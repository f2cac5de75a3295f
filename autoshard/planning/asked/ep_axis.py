"""The axis ep of a request, and what its solution says of that."""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from autoshard.planning.asked.data_parallel import data_axes
from autoshard.planning.asked.followed_plan import fingerprint
from autoshard.planning.asked.request import Request
from autoshard.planning.cost import Machine
from autoshard.planning.expert_axis import ExpertAxis
from autoshard.planning.mixtures import ROWS, WEIGHTS
from autoshard.planning.plan import without_ep
from autoshard.planning.problem import Problem
from autoshard.planning.strategy import Strategy
from autoshard.runtime.collectives import State


def expert_axis(
    gm: fx.GraphModule, n: int, machine: Machine, request: Request, second: float
) -> ExpertAxis | None:
    """The axis ep of a request; None where its mesh has none."""
    layout = request.layout
    if layout.experts == 1:
        return None
    plan = request.plan.graphs.get(fingerprint(gm)) if request.plan else None
    lines = plan.nodes.items() if plan is not None else ()
    return ExpertAxis(
        axes=data_axes(n, machine, request, second),
        parameters=request.parameters.keys(),
        # stacks are gathered once a step there, for all micro-batches, which no price knows
        exchange="rows" if layout.staged and request.ep_exchange == "auto" else request.ep_exchange,
        named=frozenset(name for name, text in lines if without_ep(text) != text),
    )


def chooses_on_ep(gm: fx.GraphModule, n: int, machine: Machine, request: Request) -> bool:
    """Whether a mixture of experts has a choice on ep."""
    axis = expert_axis(gm, n, machine, request, 1.0)
    return axis is not None and any(len(axis.ways(node)) > 1 for node in gm.graph.nodes)


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


def parts_on_ep(
    strategies: Mapping[fx.Node, Strategy], problem: Problem, ranks: int
) -> dict[fx.Node, int]:
    """The stacks of which a rank of ep, of `ranks`, uses one part, since rows travel to them."""
    return {
        stack: ranks
        for node, stacks in problem.stacks.items()
        if strategies[node].on_ep == ROWS
        for stack, _ in stacks
    }
