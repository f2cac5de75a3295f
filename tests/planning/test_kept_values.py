"""Placements and what is kept, decided together: no pair of both is cheaper at the same price."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from test_both_axes import Drawn, machine
from torch import fx

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
from autoshard.planning.mixtures import ROWS, WEIGHTS
from autoshard.planning.operators import is_view
from autoshard.planning.prices import AxisPrices, Prices
from autoshard.planning.problem import Problem
from autoshard.planning.solver import Solution
from autoshard.planning.values import producer
from autoshard.runtime.collectives import CHOICES, forward_value
from models_plain import Mixture
from traced import given_to

TP = {"tp": 2}
Asked = tuple[fx.GraphModule, int, Any, Request]


def asked(seed: int, operators: int, mesh: Mapping[str, int] = TP, zero: int | str = 3) -> Asked:
    """What `plan_graph` is given for a drawn graph on a drawn machine; with an axis ep, a mixture
    of experts."""
    given = replace(machine(seed), host=Link(1e-9, 10 ** (8 + seed % 3), 1e9))
    options: dict[str, Any] = {"mesh": dict(mesh), "zero": zero}
    if "ep" in mesh:
        mixture, x = Mixture("one", inner=256), torch.randn(8, 8)
        return given_to("plan_graph", mixture, x, given, **options)
    x = torch.randn(2, 8, 16, requires_grad=bool(seed % 2))
    return given_to("plan_graph", Drawn(seed, operators), x, given, **options)


def every_assignment(problem: Problem, most: float) -> Iterator[tuple[Solution, float]]:
    """Each assignment of the planner's problem that costs at most so much, and its cost."""
    total = costs(problem)
    for at in zip(*np.nonzero(total <= most)):
        yield Solution([int(i) for i in at], float(total[at]), 0, 0), float(total[at])


def costs(problem: Problem) -> np.ndarray:
    """What each assignment costs."""
    graph = problem.graph
    unary = graph.unary
    total = np.zeros([1] * len(unary))
    for v, costs in enumerate(unary):
        total = total + costs.reshape([-1 if i == v else 1 for i in range(len(unary))])
    for scope, table in graph.tables.items():
        sizes = iter(table.shape)
        total = total + table.reshape([next(sizes) if i in scope else 1 for i in range(len(unary))])
    return total


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
    """The state in which an operator makes its (first) value; None for a view."""
    if is_view(node):
        return None
    made = one.strategies[producer(node)[0]].output
    return forward_value(made if isinstance(made, str) else made[0])


def chosen(given: Asked, problem: Problem, at: Solution, prices: AxisPrices) -> Decisions:
    """The plan of an assignment of the planner's problem."""
    gm, n, _, request = given
    prices = copy.copy(prices)
    prices.parts = {}  # which a plan notes
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


def charged_alike(
    problem: Problem, prices: AxisPrices, one: Decisions, base: float
) -> Iterator[tuple[Decisions, float]]:
    """A plan with every choice for each weight on dp_shard, and what the planner charges it."""
    batch = prices.batch
    away = {n for n, s in problem.stacks.items() if one.strategies[n].on_ep == WEIGHTS}
    travels = {stack for node in away for stack, _ in problem.stacks[node]}
    of = [
        batch.charges(node, state, prices.stored_byte(node), node in travels)
        if batch
        else {"": 0.0}
        for node, state in one.stored.items()
    ]
    for choices in itertools.product(*of):
        more = sum(each[c] - min(each.values()) for each, c in zip(of, choices))
        weights = dict(zip(one.stored, choices)) if batch else {}
        yield replace(one, weights=weights), base + more


def cheapest(problem: Problem, way: str, count: int = 16) -> Iterator[tuple[Solution, float]]:
    """The cheapest assignments in which `way` travels over ep for the mixture."""
    (node,), total = problem.stacks, costs(problem)
    others = [i for i, one in enumerate(problem.domains[node]) if one.on_ep != way]
    total = np.moveaxis(total, problem.variables[node], 0)
    total[others] = np.inf
    total = np.moveaxis(total, 0, problem.variables[node])
    for flat in np.argsort(total, axis=None)[:count]:
        at = np.unravel_index(flat, total.shape)
        yield Solution([int(i) for i in at], float(total[at]), 0, 0), float(total[at])


def gaps(given: Asked, segments: dict[fx.Node, int], host: bool) -> tuple[list[float], set[str]]:
    """The bounds of some plans of a graph, each held against every other plan with all choices; and
    these choices."""
    gm, n, hardware, request = given

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
        host=host,
        prices=own,
        problem=problem,
    )
    found, seen = [], set[str]()
    assignments = every_assignment(built, 1.5 * built.graph.solve().cost)
    if built.stacks:  # the cheapest with either choice of the mixture
        assignments = itertools.chain(cheapest(built, ROWS), cheapest(built, WEIGHTS))
    for each, least in assignments:
        placement = chosen(given, built, each, prices)
        kept_by_price = [
            placed(given, placement, segments, price, SLOWS if host else np.inf)[:2]
            for price in (1e-11, 1e-9, 1e-8, 1e-6)
        ]
        for one, base in charged_alike(built, prices, placement, least):
            own_charge = charges.charged(built, prices, one)
            assert own_charge is not None and own_charge.seconds == pytest.approx(base, rel=1e-9)
            seen |= {*one.weights.values(), *(s.on_ep for s in one.strategies.values())} - {""}
            for kept, seconds in dict.fromkeys(kept_by_price):
                found.append((kept + own_charge.held, base + seconds, kept, seconds, one))
    found.sort(key=lambda point: point[:2])
    told = []
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
        told.append(gap)
    return told, seen


@pytest.mark.parametrize(
    ("seeds", "mesh", "zero", "choices"),
    [
        (range(1, 5), TP, 3, set()),
        (range(2, 5), {"dp_shard": 2, "tp": 2}, "auto", set(CHOICES)),
        (range(1), {"ep": 2, "tp": 2}, 3, {ROWS, WEIGHTS}),
        (range(1), {"ep": 2, "tp": 2}, "auto", {ROWS, WEIGHTS, *CHOICES}),
    ],
)
def test_no_placement_within_a_budget_is_quicker_than_the_bound(
    seeds: range,
    mesh: dict[str, int],
    zero: int | str,
    choices: set[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for seed in seeds:
        given = asked(seed, 0 if "ep" in mesh else 4, mesh, zero)
        segments = in_segments(given[0], 2, 2)
        monkeypatch.setattr(bound, "segments_by_node", lambda *_, found=segments: found)
        told, seen = gaps(given, segments, host=bool(seed % 2))
        assert min(told) == 0 < max(told)
        assert seen == choices
