"""Placements and what is kept, decided together: no pair of both is cheaper at the same price."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from test_both_axes import Drawn, machine
from torch import fx

from autoshard.building import one_rank
from autoshard.capture import intercept
from autoshard.config import Config
from autoshard.planning import planner
from autoshard.planning.cost import planned_on
from autoshard.planning.decisions import Decisions
from autoshard.planning.estimate.recomputable import values_of
from autoshard.planning.estimate.recomputation import Choices, Fate
from autoshard.planning.estimate.training import Training
from autoshard.planning.head_tail import HeadTail
from autoshard.planning.kept_values import KeptSearch
from autoshard.planning.prices import AxisPrices
from autoshard.planning.problem import Problem
from autoshard.planning.solver import Solution
from autoshard.runtime.mesh import offline_mesh

Asked = tuple[fx.GraphModule, int, Any, planner.Request]


def asked(seed: int, operators: int) -> Asked:
    """What `plan_graph` is given for a drawn graph on a drawn machine."""
    found: list[Asked] = []

    def plan(gm: Any, example: Any, inputs: Any) -> Any:
        config = Config.from_options({"mesh": {"tp": 2}, "inner": "aot_eager"})

        def recorded(*arguments: Any) -> Decisions:
            found.append(arguments)  # type: ignore[arg-type]
            return planner.plan_graph(*arguments)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(one_rank, "plan_graph", recorded)
            mesh = offline_mesh({"tp": 2}, 0)
            return one_rank.build_program(gm, example, inputs, mesh, config, machine(seed))

    torch.compiler.reset()
    x = torch.randn(2, 8, 16, requires_grad=bool(seed % 2))
    intercept(Drawn(seed, operators), (x,), None, plan)
    return found[0]


def every_assignment(problem: Problem, most: float) -> Iterator[tuple[Solution, float]]:
    """Each assignment of the planner's problem that costs at most so much, and its cost."""
    graph = problem.graph
    unary = graph.unary
    total = np.zeros([1] * len(unary))
    for v, costs in enumerate(unary):
        total = total + costs.reshape([-1 if i == v else 1 for i in range(len(unary))])
    for scope, table in graph.tables.items():
        sizes = iter(table.shape)
        total = total + table.reshape([next(sizes) if i in scope else 1 for i in range(len(unary))])
    for at in zip(*np.nonzero(total <= most)):
        yield Solution([int(i) for i in at], float(total[at]), 0, 0), float(total[at])


def placed_cost(given: Asked, decisions: Decisions, price: float) -> float:
    """Seconds computed again and kept bytes at their price, the cheapest for one placement."""
    gm, n, hardware, _ = given
    found = values_of(gm, decisions, n, planned_on(hardware), Training())
    total = 0.0
    for one, fate in zip(found, Choices(found, [0] * len(found)).fates(price, price)):
        if one.key[0] in decisions.stored:
            continue  # what a gathered weight costs is in the price of its change of state
        total += one.seconds if fate is Fate.AGAIN else one.inner * price
        total += one.nbytes * price if fate is Fate.KEPT else 0.0
    return total


def chosen(given: Asked, problem: Problem, at: Solution, prices: AxisPrices) -> Decisions:
    """The plan of an assignment of the planner's problem."""
    gm, n, _, request = given
    read = (*problem.read(at), problem.output_states(at))
    ordered = HeadTail(gm.graph, n, *read, request.contiguous_outputs)
    return planner.decided(ordered, problem, at, 0, prices, request, [])


@pytest.mark.parametrize("seed", range(12))
def test_no_placement_with_any_choice_of_what_is_kept_is_cheaper(seed: int) -> None:
    gm, n, hardware, request = given = asked(seed, operators=4)
    default = planner.plan_graph(*given)
    for price in (1e-10, 1e-8):
        search = KeptSearch(gm, default, n, planned_on(hardware), 1)
        search.price = price
        search.segments = dict.fromkeys(search.segments, 0)
        search.segments[gm.graph.output_node()] = 1  # the last; nothing is computed again there
        builder = planner.builder_of(gm, n, hardware, request, request.prices)
        problem = builder.build()
        found, _ = search.solved(builder.prices, problem)
        best = np.inf
        for each, base in every_assignment(problem, found.cost * (1 + 1e-9)):
            one = chosen(given, problem, each, builder.prices)
            best = min(best, base + placed_cost(given, one, price))
        assert found.cost == pytest.approx(best, rel=1e-9)
        alone = problem.graph.solve()
        after = placed_cost(given, chosen(given, problem, alone, builder.prices), price)
        assert found.cost <= (alone.cost + after) * (1 + 1e-9)
        if (seed, price) == (8, 1e-8):
            assert found.cost < 0.95 * (alone.cost + after)
