"""zero="auto": what dp_shard does with each weight is chosen in the plan of tp; no other choice and
no other plan is cheaper, and the programs are the serial ones."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from autoshard.planning import Plan, Request
from autoshard.planning.cost import collective_seconds
from autoshard.planning.cost.clusters import Cluster, Machine, cluster
from autoshard.planning.estimate import Training
from autoshard.planning.prices import Prices
from autoshard.planning.problem import Problem
from autoshard.planning.search.asked import batch_axis, builder_of
from autoshard.planning.solver import FactorGraph
from autoshard.runtime.collectives import CHOICES, ONCE, TWICE, WHOLE, I
from autoshard.runtime.mesh import AXIS_ORDER, offline_mesh
from autoshard.runtime.parameters import ACCUMULATE, FLUSH
from autoshard.verification.program_check import verify_program
from models_plain import Mixture
from traced import builder, drawn_cluster, given_to, programs

MESH = {"dp_shard": 2, "tp": 2}
MESHES = (MESH, {"dp_shard": 2, "ep": 2, "tp": 2}, {"ep": 2, "tp": 2})


class Drawn(nn.Module):
    """Products with weights of drawn widths, and what lies between."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = np.random.default_rng(seed)
        self.kind, width = int(draw.integers(3)), int(draw.choice([8, 16, 64]))
        self.up = nn.Linear(16, width, bias=bool(draw.integers(2)))
        self.down = nn.Linear(width, 16, bias=False)
        self.down.weight.requires_grad_(bool(draw.integers(2)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The last value, which may read the first one too."""
        y = self.down((F.gelu, torch.sin, F.relu)[self.kind](self.up(x)))
        return y + x if self.kind == 1 else y


def machine(seed: int) -> Cluster:
    """A machine of drawn links."""
    return drawn_cluster(seed, AXIS_ORDER)


def asked(
    model: nn.Module, x: torch.Tensor, mesh: dict[str, int], machine: Cluster, **options: Any
) -> tuple[fx.GraphModule, Request]:
    """The graph of a model, and what its planner is asked."""
    gm, _, _, request = given_to("plan_graph", model, x, machine, mesh=mesh, zero="auto", **options)
    return gm, request


class Recorded(FactorGraph):
    """The tables that a problem is made of."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[tuple[int, ...], np.ndarray]] = []

    def variable(self, size: int, cost: Any = None, name: Any = None) -> int:
        index = super().variable(size, cost, name)
        self.made.append(((index,), np.zeros(size) if cost is None else np.asarray(cost)))
        return index

    def add(self, variables: tuple[int, ...], table: Any, name: Any = None) -> None:
        super().add(variables, table, name)
        self.made.append((variables, table))


def least(gm: fx.GraphModule, request: Request, machine: Machine, prices: Prices) -> float:
    """The least that any plan of tp, with any choice for each weight, costs: one table of all."""
    apart = replace(request, layout=replace(request.layout, chooses=False))
    made = builder_of(gm, 2, machine, apart, prices)
    made.problem = Problem(graph=Recorded())
    problem, axis = made.build(), batch_axis(2, machine, request, prices.batch_second)
    graph = problem.graph
    assert isinstance(graph, Recorded) and axis is not None
    tables, count = [], len(graph.made)
    of = {problem.variables[node]: node for node in request.parameters}
    places = {node: i for i, node in enumerate(request.parameters)}
    variables = 1 + max(v for scope, _ in graph.made for v in scope)
    for scope, table in graph.made[:count]:
        node = of.get(scope[0]) if len(scope) == 1 else None
        if node is None:
            tables.append((scope, table))
            continue
        price = made.prices.parameter_byte * (1e-3 if node.meta["val"].dim() < 2 else 1)
        states = [one.output for one in problem.domains[node]]
        charged = [list(axis.charges(node, state, price).values()) for state in states]
        tables.append(((*scope, variables + places[node]), np.array(charged)))
    of_choices = [0] * len(places)
    for scope, table in tables:
        if scope[-1] >= variables:
            of_choices[scope[-1] - variables] = table.shape[-1]
    sizes = [len(cost) for cost in graph.unary[:variables]] + of_choices
    assert math.prod(sizes) < 2**28, sizes
    total = np.zeros([1] * len(sizes))
    for scope, table in tables:
        order = np.argsort(scope)
        shape = [1] * len(sizes)
        for v in scope:
            shape[v] = sizes[v]
        total = total + np.transpose(table, order).reshape(shape)
    return float(total.min())


def test_no_plan_with_any_choices_is_cheaper() -> None:
    """On dp_shard, on ep beside it and on ep alone, in several runs of the graph a step, with
    reductions that wait, and beside pp, where a weight is gathered once a step."""
    chosen: Counter[str] = Counter()
    staged: Counter[str] = Counter()
    other_plans = 0
    for seed in range(30):
        mesh, rows = MESHES[seed % 5 % 3], 8 * 4 ** (seed % 3)
        drawn, waits = machine(seed), seed % 4 == 1
        model, x = Drawn(seed), torch.randn(rows, 16)
        gm, request = asked(model, x, mesh, drawn, gradients={"defer": waits})
        stages, runs = seed % 6 == 2, 1 + 3 * (seed % 2)
        layout = replace(request.layout, staged=stages)
        request = replace(request, layout=layout, training=Training(microbatches=runs))
        byte, second = 10.0 ** (-8 - seed % 5), (1.0, 0.2)[seed % 2]
        prices = Prices(byte, batch_second=second)
        drawn = drawn.on(mesh)
        builder = builder_of(gm, 2, drawn, request, prices)
        problem = builder.build()
        solution = problem.graph.solve()
        assert solution.cost == pytest.approx(least(gm, request, drawn, prices), rel=1e-9), seed
        strategies, _ = problem.read(solution)
        of = [builder.prices.batch_choice(n, strategies[n].output) for n in request.parameters]
        (staged if stages else chosen).update(of)
        apart = replace(request, layout=replace(request.layout, chooses=False))
        alone = builder_of(gm, 2, drawn, apart, prices).build()
        other_plans += alone.read(alone.graph.solve())[0] != strategies
        assert len(alone.graph._tables) == len(problem.graph._tables)  # no table more
    assert set(chosen) == set(CHOICES) and set(staged) == {ONCE, WHOLE} and other_plans


class Routed(nn.Module):
    """A product and a mixture of experts, whose stacks stay on ep."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)
        self.mixture = Mixture("interleaved", biases=True, experts=4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The mean of squares."""
        found: torch.Tensor = self.mixture(self.norm(self.before(x))).square().mean()
        return found


def every_third(model: nn.Module) -> dict[str, str]:
    """A choice for each parameter, all three of them."""
    return {name: CHOICES[i % 3] for i, (name, _) in enumerate(model.named_parameters())}


@pytest.mark.parametrize(
    ("mesh", "waits", "exchange"),
    [
        ({"dp_shard": 2, "ep": 2}, False, "rows"),
        ({"dp_shard": 2, "ep": 2}, False, "weights"),
        ({"dp_shard": 2, "ep": 2}, True, "rows"),
        ({"dp_shard": 4}, False, "rows"),
    ],
)
def test_the_charge_is_of_what_runs(mesh: dict[str, int], waits: bool, exchange: str) -> None:
    """The collectives of a step of three microbatches, two of them in `no_sync`, each alone in its
    bucket, take as long as the planner charges the choices."""
    model, x = Routed(), torch.randn(24, 8)
    plan = Plan("tp", 1, weights=every_third(model))
    build = builder(model, (x,))
    options: dict[str, Any] = {
        "plan": plan,
        "planner": {"bucket_bytes": 1, "ep_exchange": exchange},
        "gradients": {"defer": waits},
    }
    steps = [
        build(mesh, microbatch=one, **options).collectives()
        for one in (ACCUMULATE, ACCUMULATE, FLUSH)
    ]
    _, request = asked(model, x, mesh, cluster("cpu"), **options)
    request = replace(request, training=Training(microbatches=3))
    here = cluster("cpu").on(mesh)
    fast = replace(here, device=replace(here.device, memory_bandwidth=math.inf))
    axis = batch_axis(1, fast, request, 1.0)
    assert axis is not None and {axis.axes.layout.deferred} == {waits}
    travels = exchange == "weights"
    charged = [
        axis.charges(node, I, 0.0, travels and "mixture" in name)
        for node, name in request.parameters.items()
    ]
    took = sum(
        collective_seconds(one.op, one.bytes, mesh[one.axis], axis.axes.links[one.axis])
        for step in steps
        for one in step
        if one.op != "all_to_all"  # rows on their way to experts
    )
    assert all(len(one) == 1 for one in charged)  # the choices of the plan
    assert took / 3 == pytest.approx(sum(s for one in charged for s in one.values()), rel=1e-6)


@pytest.mark.parametrize("mesh", [{"dp_shard": 2, "ep": 2}, {"dp_shard": 2, "ep": 2, "tp": 2}])
def test_experts_have_choices_for_the_part_that_stays(mesh: dict[str, int]) -> None:
    model, first = Routed(), torch.randn(24, 8)
    plan = Plan("tp", mesh.get("tp", 1), weights=every_third(model))
    (program,), values = programs(model, (first,), [{"mesh": mesh, "plan": plan}])
    batches = [[torch.randn(24, 8) if v is first else v for v in values] for _ in range(3)]
    found = verify_program(program, values, others=batches)
    assert found.worst[1] < 1e-5, found.worst
    for node, name in program.parameters.items():
        states = program.data[node]
        assert states["ep"] == "S(0)"
        assert ("dp_shard" in states) == (plan.weights[name] != WHOLE), name
    assert "whole" in program.explain(160)


def test_without_dp_shard_weights_are_gathered_once_or_twice() -> None:
    build = builder(Routed(), (torch.randn(24, 8),))
    program = build({"ep": 2}, zero="auto", planner={"ep_exchange": "rows"})
    weights = program.plan.weights
    for name, choice in weights.items():
        stack = name in ("mixture.up", "mixture.down", "mixture.up_bias", "mixture.down_bias")
        assert (choice == WHOLE) == stack, weights  # on ep nothing of a stack is gathered
    again = {p.change.split(":")[0] for p in program.collectives() if p.phase == "backward"}
    assert again


def mixed(axis: str = "tp") -> Plan:
    """A plan that keeps one weight whole, gathers one once and one twice, and says no more."""
    weights = {"up.weight": WHOLE, "up.bias": ONCE, "norm.weight": WHOLE, "norm.bias": TWICE}
    return Plan(axis, 2, weights={**weights, "gate.weight": ONCE, "down.weight": TWICE})


class Gated(nn.Module):
    """Three products and a norm."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.gate = nn.Linear(16, 64), nn.Linear(16, 64, bias=False)
        self.down, self.norm = nn.Linear(64, 16, bias=False), nn.LayerNorm(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The mean of squares."""
        x = self.norm(x)
        return (x + self.down(torch.sigmoid(self.gate(x)) * self.up(x))).square().mean()


@pytest.mark.parametrize(
    "mesh", [MESH, {"dp_replicate": 2, **MESH}, {"dp_shard": 2, "cp": 2, "tp": 2}]
)
def test_a_mixture_is_the_serial_model(mesh: dict[str, int]) -> None:
    count = offline_mesh(mesh, 0).batches
    shape = (4, 8, 16)
    first, *others = [torch.randn(shape) for _ in range(count)]
    plan = replace(mixed(), outer=Plan("cp", 2) if "cp" in mesh else None)
    (program,), values = programs(Gated(), (first,), [{"mesh": mesh, "plan": plan}])
    assert program.plan.weights == plan.weights
    batches = [[one if v is first else v for v in values] for one in others]
    found = verify_program(program, values, others=batches)
    assert found.worst[1] < 1e-5, found.worst


def test_each_axis_sends_what_the_choices_say() -> None:
    """On dp_shard=2: a whole weight's gradient is all-reduced; a split one is gathered once or
    twice and its gradient scattered; what tp splits travels by halves."""
    build = builder(Gated(), (torch.randn(4, 8, 16),))
    program = build(MESH, plan=mixed(), planner={"bucket_bytes": 1})
    sent: Counter[tuple[str, str]] = Counter()
    for one in program.collectives():
        if one.axis == "dp_shard":
            sent[one.op, one.phase] += one.bytes
    sizes = {program.parameters[n]: 4 * n.meta["val"].numel() for n in program.parameters}
    for name, state in program.plan.parameters.items():
        sizes[name] //= 1 if state == "I" else 2
    of = {choice: {n for n, c in program.plan.weights.items() if c == choice} for choice in CHOICES}
    split = sum(sizes[name] for name in of[ONCE] | of[TWICE])
    assert sent == {
        ("all_gather", "forward"): split,
        ("all_gather", "backward"): sizes["down.weight"] + sizes["norm.bias"],
        ("reduce_scatter", "backward"): split,
        ("all_reduce", "backward"): sum(sizes[name] for name in of[WHOLE]),
    }
    parameters = sum(sizes[n] / (1 if n in of[WHOLE] else 2) for n in sizes)
    assert program.memory().parameters == parameters


def test_a_budget_decides_how_many_weights_are_gathered_once() -> None:
    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(8)])
    build = builder(model, (torch.randn(16, 256),))
    once = {}
    for budget in (3_410_000, 4_200_000, 30_000_000):
        program = build(
            {"dp_shard": 4},
            zero="auto",
            planner={"bucket_bytes": 100_000},
            memory={"budget": budget},
        )
        assert program.memory().peak <= budget
        weights = program.plan.weights
        once[budget] = [int(n[0]) for n, c in weights.items() if c != TWICE and "weight" in n]
    some, most = once[4_200_000], [1, 2, 3, 4, 5, 6, 7]  # backward reads no weight of the first
    assert not once[3_410_000] and once[30_000_000] == most
    assert 0 < len(some) < 7 and some == most[-len(some) :]  # those that are read last


def test_a_budget_makes_bytes_cheaper_on_cp_and_tp() -> None:
    """The plan of cp, made with that of tp at the default price, stays: none is cheaper there."""
    model = nn.Sequential(*[nn.Linear(256, 256, bias=False) for _ in range(4)])
    build = builder(model, (torch.randn(2, 32, 256),))
    mesh, once, layouts = {"dp_shard": 4, "cp": 2, "tp": 2}, [], []
    for budget in (None, 3_000_000):
        options: dict[str, Any] = {"zero": "auto", "planner": {"bucket_bytes": 100_000}}
        program = build(mesh, hardware_name="h100", memory={"budget": budget}, **options)
        assert budget is None or program.memory().peak <= budget
        once.append(sum(one != TWICE for one in program.plan.weights.values()))
        assert program.outer is not None and program.outer.gap(program.decisions) == 0.0
        layouts.append(program.outer.decisions.strategies.values())
    assert once[0] == 0 < once[1]
    assert [*layouts[0]] == [*layouts[1]]


def test_a_plan_file_has_the_choices(tmp_path: Path) -> None:
    build = builder(Gated(), (torch.randn(4, 8, 16),))
    first = build(MESH, plan=mixed())
    first.plan.save(tmp_path / "plan.json")
    again = build(MESH, plan=tmp_path / "plan.json")
    assert again.plan == first.plan and again.plan.weights == mixed().weights
    assert "whole" in first.explain(width=160)
