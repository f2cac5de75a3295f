"""cp and tp planned together: no pair of plans is cheaper, as trying every one of them finds."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from autoshard.building import first_axis
from autoshard.building.first_axis import lay_out
from autoshard.planning.cost.clusters import Cluster, Machine
from autoshard.planning.decisions import Decisions
from autoshard.planning.prices import Prices
from autoshard.planning.search.asked import builder_of
from autoshard.planning.search.two_axes import TwoAxes
from autoshard.planning.strategy import operands
from autoshard.planning.values import output_state
from autoshard.runtime.collectives.states import State
from traced import drawn_cluster, given_to

BOTH = {"cp": 2, "tp": 2}
_ONE = (F.gelu, torch.sin, lambda x: x.sum(1, keepdim=True), lambda x: x.softmax(-1))
_TWO = (torch.add, torch.mul)


class Drawn(nn.Module):
    """A few operators over values drawn from those before, a product with a weight among them."""

    def __init__(self, seed: int, operators: int) -> None:
        super().__init__()
        draw = np.random.default_rng(seed)
        product = int(draw.integers(operators))
        self.weight, self.drawn = nn.Linear(16, 16, bias=False), []
        for i in range(operators):
            kind = -1 if i == product else int(draw.integers(6))
            one, other = (int(draw.integers(max(0, i - 1), i + 1)) for _ in range(2))
            self.drawn.append((kind, one, other))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The last value; which may read others twice, or not at all."""
        values = [x]
        for kind, one, other in self.drawn:
            if kind < 0:
                values.append(self.weight(values[one]))
            elif kind < 4:
                values.append(_ONE[kind](values[one]))
            else:
                values.append(_TWO[kind - 4](values[one], values[other]))
        return values[-1]


def machine(seed: int) -> Cluster:
    """A drawn machine: either axis may be the dearer one."""
    return drawn_cluster(seed, ("cp", "tp"))


def asked(seed: int, operators: int, **options: Any) -> tuple[Any, ...]:
    """What `lay_out` is given for a drawn graph on a drawn machine."""
    x = torch.randn(2, 8, 16, requires_grad=bool(seed % 2))
    return given_to("lay_out", Drawn(seed, operators), x, machine(seed), mesh=BOTH, **options)


def every_outer_plan(gm: fx.GraphModule, machine: Machine, asked: TwoAxes) -> Iterator[Decisions]:
    """Each plan of the outer axis, whatever it costs; those that move alike once."""
    builder = builder_of(gm, asked.ranks[0], machine, asked.outer, Prices())
    problem = builder.build()
    nodes, copied = list(problem.domains), list(problem.copy_domains)
    sizes = [len(problem.domains[node]) for node in nodes]
    sizes += [len(problem.copy_domains[node]) for node in copied]
    outputs = [entry for entry in problem.outputs if entry]
    sizes += [len(states) for _, states in outputs]
    seen: set[Any] = set()
    for drawn in itertools.product(*map(range, sizes)):
        at = iter(drawn)
        strategies = {node: problem.domains[node][next(at)] for node in nodes}
        copies = {node: problem.copy_domains[node][next(at)] for node in copied}
        states = [states[next(at)] for _, states in outputs]
        one = Decisions(
            strategies=strategies,
            copies=copies,
            stored={node: output_state(strategies[node], None) for node in asked.outer.parameters},
            outputs=states,
            offered=problem.domains,
            declined={},
            seconds=np.inf,
            variables=0,
            width=0,
            work=0,
            prices=builder.prices,
        )
        routes = tuple(one.route(source, want) for source, want in _reads(gm, one))
        if (key := (*drawn[: len(nodes)], *states, routes)) not in seen:
            seen.add(key)
            yield one


def _reads(gm: fx.GraphModule, one: Decisions) -> Iterator[tuple[fx.Node, State]]:
    """Every value that is read, and the state it is wanted in."""
    for node, strategy in one.strategies.items():
        yield from zip(operands(node), strategy.inputs)
    (results,) = gm.graph.output_node().args
    yield from zip(results, one.outputs)  # type: ignore[arg-type]


def least(arguments: tuple[Any, ...]) -> float:
    """The least that any two plans cost: every one of cp, each with the exact one of tp on the
    graph that it leaves a rank."""
    plans: list[Decisions] = []

    def listed(gm: fx.GraphModule, machine: Machine, asked: TwoAxes) -> None:
        plans.extend(every_outer_plan(gm, machine, asked))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(first_axis, "plan_both", listed)
        lay_out(*arguments)
        found = []
        for one in plans:
            patch.setattr(first_axis, "plan_both", lambda *_, one=one: one)
            found.append(lay_out(*arguments).seconds)
    return min(found)


def apart(arguments: tuple[Any, ...]) -> float:
    """What the plans cost where cp is planned for itself."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(first_axis, "plan_both", lambda *_: None)
        return lay_out(*arguments).seconds


def check(seeds: Iterable[int], operators: int) -> int:
    """How many of the drawn graphs cost less than with one axis planned after the other."""
    less = 0
    for seed in seeds:
        arguments = asked(seed, operators)
        both, exact = lay_out(*arguments), least(arguments)
        assert both.seconds == pytest.approx(exact, rel=1e-9), seed
        assert both.outer.bound == pytest.approx(exact, rel=1e-6), seed
        before = apart(arguments)
        assert before >= exact * (1 - 1e-9), seed
        less += before > 1.001 * exact
    return less


def test_no_two_plans_are_cheaper() -> None:
    assert check((3, 6, 8, 18, 24, 32), operators=4) == 4


@pytest.mark.slow
def test_no_two_plans_of_more_graphs_are_cheaper() -> None:
    check(range(16, 41), operators=4)


def test_a_value_in_three_states_over_cp_leaves_a_gap_that_is_told() -> None:
    """The bound counts in part what several readers could share; the plan is the cheapest known."""
    arguments = asked(41, 4)
    both = lay_out(*arguments)
    gap = both.outer.gap(both.decisions)
    assert gap is not None and 0 < gap < 1
    assert both.outer.bound == pytest.approx((1 - gap) * both.seconds)
    assert both.seconds <= apart(arguments) * (1 + 1e-9)


def test_under_a_budget_another_plan_of_cp_runs_where_it_is_predicted_quicker() -> None:
    arguments = asked(11, 8)
    serial, inner, *others = arguments
    inner = replace(inner, memory_budget=10**9, budget_is_known=False)
    free = lay_out(serial, inner, *others)
    assert free.outer.tried == 1
    needs = free.estimate(free.decisions)
    part = int(0.6 * (needs.least - needs.resident))
    for budget, dearer in ((needs.resident + part, True), (needs.resident, False)):
        under = (serial, replace(inner, memory_budget=budget), *others)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(first_axis, "both_at_dearer_bytes", lambda *_: iter(()))
            before = lay_out(*under)
        found = lay_out(*under)
        own, other = (one.estimate(one.decisions) for one in (found, before))
        assert (found.outer.dearer, found.outer.tried > 1) == (dearer, dearer)
        assert not dearer or (own.least <= budget and own.seconds < other.seconds)
        plans = [one.outer.decisions.graph_plan() for one in (found, before)]
        assert (plans[0] != plans[1]) == dearer
