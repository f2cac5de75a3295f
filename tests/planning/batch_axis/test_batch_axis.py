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

from autoshard.building import one_rank
from autoshard.capture import intercept
from autoshard.config import Config
from autoshard.errors import ConfigError
from autoshard.planning import Plan, Request, plan_graph
from autoshard.planning.batch_axis import batch_axis
from autoshard.planning.cost.machines import Hardware, Link, hardware
from autoshard.planning.planner import builder_of
from autoshard.planning.prices import Prices
from autoshard.planning.problem import Problem
from autoshard.planning.solver import FactorGraph
from autoshard.runtime.collectives import CHOICES, ONCE, TWICE, WHOLE
from autoshard.runtime.mesh import offline_mesh
from autoshard.verification.program_check import verify_program
from traced import builder, programs

MESH = {"dp_shard": 2, "tp": 2}


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


def machine(seed: int) -> Hardware:
    """Links of any latency and bandwidth, under a name that no built-in machine has."""
    draw = np.random.default_rng(seed)
    cpu = hardware("cpu")
    links = {
        name: Link(10 ** draw.uniform(-7, -4), 10 ** draw.uniform(7, 10), 1e9) for name in cpu.links
    }
    return replace(cpu, name="drawn", links=links)


def asked(seed: int, rows: int) -> tuple[fx.GraphModule, Request]:
    """A drawn graph, and what its planner is asked."""
    found: list[Any] = []

    def plan(gm: Any, example: Any, inputs: Any) -> Any:
        def recorded(gm: Any, n: int, hardware: Hardware, request: Request) -> Any:
            found.append((gm, request))
            return plan_graph(gm, n, hardware, request)

        config = Config.from_options({"mesh": MESH, "inner": "aot_eager", "zero": "auto"})
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(one_rank, "plan_graph", recorded)
            mesh = offline_mesh(MESH, 0)
            return one_rank.build_program(gm, example, inputs, mesh, config, machine(seed))

    torch.compiler.reset()
    intercept(Drawn(seed), (torch.randn(rows, 16),), None, plan)
    return found[0]


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


def least(gm: fx.GraphModule, request: Request, machine: Hardware, prices: Prices) -> float:
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
    sizes = [graph.size(v) for v in range(variables)] + [len(CHOICES)] * len(places)
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
    chosen: Counter[str] = Counter()
    other_plans = 0
    for seed in range(24):
        gm, request = asked(seed, rows=8 * 4 ** (seed % 3))
        byte, second = 10.0 ** (-8 - seed % 5), (1.0, 0.2)[seed % 2]
        prices, drawn = Prices(byte, batch_second=second), machine(seed)
        builder = builder_of(gm, 2, drawn, request, prices)
        problem = builder.build()
        solution = problem.graph.solve()
        assert solution.cost == pytest.approx(least(gm, request, drawn, prices), rel=1e-9), seed
        strategies, _ = problem.read(solution)
        chosen.update(
            builder.prices.batch_choice(n, strategies[n].output) for n in request.parameters
        )
        apart = replace(request, layout=replace(request.layout, chooses=False))
        alone = builder_of(gm, 2, drawn, apart, prices).build()
        other_plans += alone.read(alone.graph.solve())[0] != strategies
        assert len(alone.graph._tables) == len(problem.graph._tables)  # no table more
    assert set(chosen) == set(CHOICES) and other_plans


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
    program = build(MESH, plan=mixed(), bucket_bytes=1)
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
        program = build({"dp_shard": 4}, zero="auto", bucket_bytes=100_000, memory_budget=budget)
        assert program.memory().peak <= budget
        weights = program.plan.weights
        once[budget] = [int(n[0]) for n, c in weights.items() if c != TWICE and "weight" in n]
    some, most = once[4_200_000], [1, 2, 3, 4, 5, 6, 7]  # backward reads no weight of the first
    assert not once[3_410_000] and once[30_000_000] == most
    assert 0 < len(some) < 7 and some == most[-len(some) :]  # those that are read last


def test_what_is_refused() -> None:
    build = builder(Gated(), (torch.randn(4, 8, 16),))
    with pytest.raises(ConfigError, match="beside ep"):
        build({"dp_shard": 2, "ep": 2}, zero="auto")


def test_a_plan_file_has_the_choices(tmp_path: Path) -> None:
    build = builder(Gated(), (torch.randn(4, 8, 16),))
    first = build(MESH, plan=mixed())
    first.plan.save(tmp_path / "plan.json")
    again = build(MESH, plan=tmp_path / "plan.json")
    assert again.plan == first.plan and again.plan.weights == mixed().weights
    assert "whole" in first.explain(width=160)
