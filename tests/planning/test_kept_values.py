"""Placements and what is kept, decided together: no pair of both is cheaper at the same price."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from test_both_axes import Drawn, machine
from torch import fx

from autoshard.building import one_rank
from autoshard.capture import intercept
from autoshard.config import Config
from autoshard.planning import Request, one_axis
from autoshard.planning.cost import planned_on
from autoshard.planning.cost.machines import Link
from autoshard.planning.decisions import Decisions, Recomputation
from autoshard.planning.estimate.frontiers import SLOWS, kept_in_the_last
from autoshard.planning.estimate.recomputable import values_of
from autoshard.planning.estimate.recomputation import Choices, Fate
from autoshard.planning.estimate.training import Training
from autoshard.planning.head_tail import HeadTail
from autoshard.planning.kept_values import KeptSearch, bound, charges
from autoshard.planning.operators import is_view
from autoshard.planning.prices import AxisPrices, Prices
from autoshard.planning.problem import Problem
from autoshard.planning.solver import Solution
from autoshard.runtime.collectives import forward_value
from autoshard.runtime.mesh import offline_mesh

Asked = tuple[fx.GraphModule, int, Any, Request]


def asked(seed: int, operators: int) -> Asked:
    """What `plan_graph` is given for a drawn graph on a drawn machine."""
    found: list[Asked] = []

    def plan(gm: Any, example: Any, inputs: Any) -> Any:
        config = Config.from_options({"mesh": {"tp": 2}, "inner": "aot_eager"})

        def recorded(*arguments: Any) -> Decisions:
            found.append(arguments)  # type: ignore[arg-type]
            return one_axis.plan_graph(*arguments)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(one_rank, "plan_graph", recorded)
            mesh = offline_mesh({"tp": 2}, 0)
            given = replace(machine(seed), host=Link(1e-9, 10 ** (8 + seed % 3), 1e9))
            return one_rank.build_program(gm, example, inputs, mesh, config, given)

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


def placed(
    given: Asked, one: Decisions, segments: dict[fx.Node, int], price: float, charge: float
) -> tuple[float, float, set[Fate]]:
    """(kept bytes, seconds computed again and of transfers at their charge, fates) of the cheapest
    choice for one placement. A change of state is in the segment of its first reader."""
    gm, n, hardware, _ = given
    found = values_of(gm, one, n, planned_on(hardware), Training())
    last = max(segments.values())
    places, place = [last], last
    for each in reversed(found):
        place = segments[each.key[0]] if each.key[1] == own(one, each.key[0]) else place
        places.insert(0, place)
    nothing = dict(nbytes=0, inner=0, seconds=0.0, sources=(), needed=False)
    found = kept_in_the_last([*found, replace(found[-1], **nothing)], places)
    fates = Choices(found, places).fates(price, price, charge)
    # what a gathered weight costs is in the price of its change of state
    pairs = [pair for pair in zip(found, fates) if pair[0].key[0] not in one.stored]
    kept = seconds = 0.0
    for each, fate in pairs:
        kept += each.nbytes * (fate is Fate.KEPT) + each.inner * (fate is not Fate.AGAIN)
        seconds += each.seconds if fate is Fate.AGAIN else 0.0
        seconds += each.transfer * charge if fate is Fate.HOST else 0.0
    return kept, seconds, {fate for _, fate in pairs}


def own(one: Decisions, node: fx.Node) -> Any:
    """The state in which an operator makes its value; None for a view."""
    return forward_value(one.state(node)) if not is_view(node) else None


def chosen(given: Asked, problem: Problem, at: Solution, prices: AxisPrices) -> Decisions:
    """The plan of an assignment of the planner's problem."""
    gm, n, _, request = given
    read = (*problem.read(at), problem.output_states(at))
    ordered = HeadTail(gm.graph, n, *read, request.contiguous_outputs)
    return one_axis.decided(ordered, problem, at, 0, prices, request, [])


def least(
    given: Asked, segments: dict[fx.Node, int], price: float, charge: float
) -> tuple[float, float, set[Fate]]:
    """The joint sum; the least of every placement with its minimum cut, and the fates there."""
    gm, n, hardware, request = given
    search = KeptSearch(gm, one_axis.plan_graph(*given), n, planned_on(hardware), 1)
    search.price, search.charge, search.before.segments = price, charge, segments
    builder = one_axis.builder_of(gm, n, hardware, request, request.prices)
    problem = builder.build()
    found, _ = search.solved(builder.prices, problem)
    best: tuple[float, set[Fate]] = (np.inf, set())
    for each, base in every_assignment(problem, found.cost * (1 + 1e-9)):
        one = chosen(given, problem, each, builder.prices)
        kept, seconds, fates = placed(given, one, segments, price, charge)
        best = min(best, (base + kept * price + seconds, fates), key=lambda pair: pair[0])
    return found.cost, *best


def in_segments(gm: fx.GraphModule, border: int, end: int) -> dict[fx.Node, int]:
    """The operators before and after a border, and the number of the last segment."""
    nodes = [node for node in gm.graph.nodes if node.op == "call_function"]
    return {**{node: int(i >= border) for i, node in enumerate(nodes)}, gm.graph.output_node(): end}


@pytest.mark.parametrize("seed", range(12))
def test_no_placement_with_any_choice_of_what_is_kept_is_cheaper(seed: int) -> None:
    given, seen = asked(seed, operators=4), set[Fate]()
    segments = in_segments(given[0], 99, 1)
    for price, charge in ((1e-10, np.inf), (1e-8, np.inf), (1e-9, 0.04), (1e-8, 0.3)):
        found, best, fates = least(given, segments, price, charge)
        assert found == pytest.approx(best, rel=1e-9)
        seen |= fates
    assert seen == set(Fate) or seed != 8


@pytest.mark.parametrize("seed", range(12))
def test_across_segments_no_placement_with_any_choice_is_below_the_joint_sum(seed: int) -> None:
    given, wide = asked(seed, operators=4), seed % 2
    for price, charge in ((1e-9, np.inf), (1e-8, np.inf), (1e-8, 0.04)):
        segments = in_segments(given[0], 1 + seed % 3, 1 + wide)
        found, best, _ = least(given, segments, price, charge)
        assert 0.9 * best <= found <= best * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(1, 5))
def test_no_placement_within_a_budget_is_quicker_than_the_bound(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    gm, n, hardware, request = given = asked(seed, operators=4)
    segments = in_segments(gm, 2, 2)
    monkeypatch.setattr(bound, "segments_by_node", lambda *_: segments)

    def problem(prices: Prices) -> tuple[Problem, AxisPrices]:
        builder = one_axis.builder_of(gm, n, hardware, request, prices)
        return builder.build(), builder.prices

    default = one_axis.plan_graph(*given).prices
    own = Prices(default.parameter_byte, default.activation_byte)
    built, prices = problem(own)
    dual = bound.Dual(
        gm=gm,
        n=n,
        cluster=planned_on(hardware),
        shard=1,
        host=bool(seed % 2),
        prices=own,
        problem=problem,
    )
    found = []
    for each, base in every_assignment(built, 1.5 * built.graph.solve().cost):
        one = chosen(given, built, each, prices)
        own_charge = charges.charged(built, prices, one)
        assert own_charge is not None and own_charge.seconds == pytest.approx(base, rel=1e-9)
        for price in (1e-11, 1e-9, 1e-8, 1e-6):
            charge = SLOWS if dual.host else np.inf
            kept, seconds, _ = placed(given, one, segments, price, charge)
            found.append((kept + own_charge.held, base + seconds, kept, seconds, one))
    found.sort(key=lambda point: point[:2])
    gaps = []
    for needs, total, kept, seconds, one in found[:: max(1, len(found) // 8)]:
        one.recomputation = Recomputation(
            again=frozenset(),
            saved=frozenset(),
            kept=int(kept),
            spared=0,
            peak=0,
            seconds=seconds,
            bound=0.0,
        )
        gap = dual.gap(one)
        assert gap is not None
        quickest = min(other[1] for other in found if other[0] <= needs)
        assert total - quickest <= gap + 1e-9 * total
        assert gap <= total - quickest + 0.1 * total
        gaps.append(gap)
    assert min(gaps) == 0 < max(gaps)
