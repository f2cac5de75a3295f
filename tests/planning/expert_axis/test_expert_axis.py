"""What travels over ep is chosen for each mixture of experts in the plan of tp or cp: no other
choice with any plan is cheaper, prices are those of the estimate, and programs the serial ones."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, fx, nn

from autoshard.explain.alternatives import alternatives
from autoshard.planning import Plan, Request, fingerprint
from autoshard.planning.cost import WAIT_SECONDS, collective_seconds
from autoshard.planning.cost.clusters import Cluster, Machine
from autoshard.planning.estimate import Layout
from autoshard.planning.mixtures import ROWS, WEIGHTS, exchangeable, is_mixture
from autoshard.planning.plan import GraphPlan, without_ep
from autoshard.planning.prices import Prices
from autoshard.planning.problem import Builder
from autoshard.planning.search.asked import builder_of, expert_axis
from autoshard.program import Program
from autoshard.runtime.mesh import AXIS_ORDER
from autoshard.runtime.operators.bound import unbound
from autoshard.runtime.operators.experts import (
    EXPERTS,
    exchanged_experts,
    owned_experts,
    rows_travel,
    split_experts,
)
from autoshard.verification.program_check import verify_program
from models_plain import Mixture
from traced import builder, drawn_cluster, given_to, programs


class Drawn(nn.Module):
    """Mixtures of drawn sizes, one behind the other."""

    def __init__(self, seed: int, layers: int) -> None:
        super().__init__()
        draw = np.random.default_rng(seed)
        self.layers = nn.ModuleList(
            Mixture(
                str(draw.choice(["packed", "interleaved", "one"])),
                experts=int(draw.choice([4, 6, 8])),
                k=int(draw.integers(1, 3)),
                inner=int(draw.choice([16, 64])),
            )
            for _ in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        """The last layer's tokens."""
        for layer in self.layers:
            x = layer(x)
        return x


def machine(seed: int) -> Cluster:
    """A machine of drawn links."""
    return drawn_cluster(seed, AXIS_ORDER)


def asked(
    seed: int, layers: int, mesh: dict[str, int], zero: int | str
) -> tuple[fx.GraphModule, Request]:
    """A drawn graph, and what its planner is asked."""
    model, x = Drawn(seed, layers), torch.randn(16 * 8 ** (seed % 3), 8)
    gm, _, _, request = given_to("plan_graph", model, x, machine(seed), mesh=mesh, zero=zero)
    return gm, request


def fixed(
    gm: fx.GraphModule, n: int, machine: Machine, request: Request, ways: Mapping[str, str]
) -> tuple[Builder, Any]:
    """The problem in which these mixtures have one choice on ep each, which is no choice."""
    made = builder_of(gm, n, machine, request, request.prices)

    def restricted(node: fx.Node) -> tuple[str, ...]:
        return (ways[node.name],) if node.name in ways else ()

    made._ways = restricted  # type: ignore[method-assign]
    return made, made.build()


def least(problem: Any) -> float:
    """The least of one table over all variables."""
    graph = problem.graph
    sizes = [len(one) for one in graph.unary]
    assert math.prod(sizes) < 2**27, sizes
    total = np.zeros(sizes)
    scoped = [((v,), one) for v, one in enumerate(graph.unary)] + list(graph.tables.items())
    for scope, table in scoped:
        total = total + table.reshape([sizes[v] if v in scope else 1 for v in range(len(sizes))])
    return float(total.min())


def test_experts_that_make_no_number_of_rows_of_zeros_keep_their_rows() -> None:
    """An expert's rows are filled up with zeros where they travel."""
    gm, _ = asked(0, 1, {"ep": 2}, 3)
    node = next(filter(is_mixture, gm.graph.nodes))
    rows, shape, ids, stacks, body, *rest = node.args
    assert exchangeable(node) == 6
    for bad in ("log", "rsqrt"):
        node.args = (rows, shape, ids, stacks, body.replace("aten.relu.", f"aten.{bad}."), *rest)
        assert exchangeable(node) == 0


MESHES = ({"ep": 2, "tp": 2}, {"ep": 2}, {"dp_shard": 2, "ep": 2, "cp": 2})


def test_no_plan_with_any_choices_is_cheaper() -> None:
    """Against one table of every plan for each choice of the mixture; of two mixtures, against the
    exact plan of each pair of choices."""
    chosen: Counter[str] = Counter()
    other_plans = 0
    for seed in range(18):
        mesh, layers = MESHES[seed % 3], 1 + seed // 9
        gm, request = asked(seed, layers, mesh, 2 + seed % 2)
        n, drawn = max(mesh.get("tp", 1), mesh.get("cp", 1)), machine(seed).on(mesh)
        byte, second = 10.0 ** (-8 - seed % 4), (1.0, 0.2)[seed % 2]
        request = replace(request, prices=Prices(byte, batch_second=second))
        free = builder_of(gm, n, drawn, request, request.prices)
        problem = free.build()
        solution = problem.graph.solve()
        mixtures = [node.name for node in gm.graph.nodes if is_mixture(node)]
        assert len(mixtures) == layers
        costs, plans = [], []
        for ways in itertools.product((ROWS, WEIGHTS), repeat=layers):
            _, one = fixed(gm, n, drawn, request, dict(zip(mixtures, ways)))
            alone = one.graph.solve()
            costs.append(alone.cost if layers > 1 else least(one))
            plans.append([one.read(alone)[0][node] for node in one.variables])
        assert solution.cost == pytest.approx(min(costs), rel=1e-9), seed
        assert len(problem.graph.unary) == len(one.graph.unary)  # no variable more
        strategies, _ = problem.read(solution)
        chosen.update(strategies[n].on_ep for n in gm.graph.nodes if is_mixture(n))
        bare = [[replace_way(each) for each in plan] for plan in plans]
        other_plans += any(one != bare[0] for one in bare)
    assert set(chosen) == {ROWS, WEIGHTS} and other_plans


def test_the_choices_of_a_stack_on_ep_and_on_dp_shard_are_one() -> None:
    """With zero="auto": against the plan in which rows travel, and the one without an axis ep for
    mixtures, whose stacks are gathered as any other parameter is."""
    chosen: Counter[str] = Counter()
    for seed in range(8):
        mesh = ({"dp_shard": 2, "ep": 2, "tp": 2}, {"dp_shard": 2, "ep": 2})[seed % 2]
        gm, request = asked(seed, 1, mesh, "auto")
        n, drawn = mesh.get("tp", 1), machine(seed).on(mesh)
        prices = Prices(10.0 ** (-8 - seed % 4), batch_second=(1.0, 0.2)[seed // 4])
        request = replace(request, prices=prices)
        problem = builder_of(gm, n, drawn, request, request.prices).build()
        solution = problem.graph.solve()
        (mixture,) = filter(is_mixture, gm.graph.nodes)
        _, rows = fixed(gm, n, drawn, request, {mixture.name: ROWS})
        plain = builder_of(gm, n, drawn, request, request.prices)
        plain.on_ep, plain.prices.batch = None, replace(plain.prices.batch, experts={})  # type: ignore[type-var]
        costs = {ROWS: rows.graph.solve().cost, WEIGHTS: plain.build().graph.solve().cost}
        assert solution.cost == pytest.approx(min(costs.values()), rel=1e-9), seed
        way = problem.read(solution)[0][mixture].on_ep
        assert costs[way] == pytest.approx(min(costs.values()), rel=1e-9), seed
        chosen[way] += 1
    assert set(chosen) == {ROWS, WEIGHTS}


def replace_way(strategy: Any) -> Any:
    return strategy._replace(on_ep="")


class Layers(nn.Module):
    """Two mixtures between linears."""

    def __init__(self, biases: bool = False, **settings: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before = nn.Linear(8, 8, bias=False)
        form = "interleaved" if biases else "packed"
        self.first, self.second = (
            Mixture(form, biases=biases, experts=8, **settings) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.second(self.first(self.before(x))).square().mean()
        return found


def mixtures(program: Program) -> list[fx.Node]:
    return [node for node in program.serial.graph.nodes if is_mixture(node)]


def told(program: Program, ways: tuple[str, ...]) -> Plan:
    """The program's plan, but for what travels for each mixture."""
    graph = program.decisions.graph_plan()
    for node, way in zip(mixtures(program), ways, strict=True):
        graph.nodes[node.name] = f"{without_ep(graph.nodes[node.name])}, {way} over ep"
    graphs = {fingerprint(program.serial): GraphPlan(graph.nodes, graph.copies)}
    return replace(program.plan, graphs=graphs)


def travelling(program: Program) -> list[str]:
    """What travels for each mixture, by the graph of a rank."""
    runs = (EXPERTS, exchanged_experts, owned_experts, split_experts)
    nodes = [n for n in program.graph_module.graph.nodes if n.op == "call_function"]
    own = [n for n in nodes if unbound(n.target)[0] in runs]
    return [ROWS if any(a.name == "ep" for a in rows_travel(n)) else WEIGHTS for n in own]


TWO = {"ep": 2, "tp": 2}


@pytest.mark.parametrize(("mesh", "zero"), [({"ep": 2}, 2), ({"ep": 2}, 3), (TWO, 3)])
def test_prices_are_those_of_the_estimate_and_of_the_program(
    mesh: dict[str, int], zero: int
) -> None:
    """Rows instead of weights for one mixture, all else as it is: what the planner charges ep less
    is what the program and the estimate of a step have less on it."""
    build = builder(Layers(inner=64), (torch.randn(64, 8),))
    settings: dict[str, Any] = {
        "hardware_name": "h100",
        "planner": {"bucket_bytes": 1},
        "zero": zero,
    }
    free, sheet, real, charged = build(mesh, **settings), {}, {}, {}
    machine, n = free.machine, mesh.get("tp", 1)
    link = machine.links["ep"]
    for way in (ROWS, WEIGHTS):
        program = build(mesh, plan=told(free, (way, ROWS)), **settings)
        node, decisions = mixtures(program)[0], program.decisions
        assert travelling(program) == [way, ROWS] and decisions.strategies[node].on_ep == way
        sheet[way] = sum(
            collective_seconds(one.op, one.bytes, 2, link)
            for one in program.collectives()
            if one.axis == "ep"
        )
        real[way] = alternatives(program)[0].timing.traffic["ep"].seconds
        layout = Layout.of(mesh, zero, 1)
        request = Request(parameters=program.parameters, layout=layout)
        axis = expert_axis(program.serial, n, program.machine, request, 1.0)
        assert axis is not None
        slower = replace(axis, axes=replace(axis.axes, links={"ep": machine.real_links["ep"]}))
        stacks = [(one, node, decisions.stored[one], 0.0) for one in node.args[3]]  # type: ignore[union-attr]
        charged[way] = [
            each.rows(node, decisions.strategies[node]) - WAIT_SECONDS
            if way == ROWS
            else sum(each.gathered(*one) for one in stacks)  # type: ignore[arg-type]
            for each in (axis, slower)
        ]
    for found, i in ((sheet, 0), (real, 1)):
        want = found[WEIGHTS] - found[ROWS]
        assert charged[WEIGHTS][i] - charged[ROWS][i] == pytest.approx(want, rel=1e-3)


@pytest.mark.parametrize(
    ("mesh", "ways", "zero"),
    [
        ({"ep": 2}, (WEIGHTS, ROWS), 2),
        (TWO, (ROWS, WEIGHTS), 3),
        ({"dp_shard": 2, "ep": 2}, (WEIGHTS, WEIGHTS), 3),
        ({"dp_shard": 2, "ep": 2}, (ROWS, WEIGHTS), "auto"),
    ],
)
def test_what_a_plan_file_says_runs_and_is_the_serial_model(
    mesh: dict[str, int], ways: tuple[str, str], zero: int | str, tmp_path: Path
) -> None:
    x = torch.randn(24, 8)
    model, options = Layers(biases=True), {"mesh": mesh, "zero": zero}
    (free,), values = programs(model, (x,), [options])
    told(free, ways).save(tmp_path / "plan.json")
    torch.compiler.reset()
    (program,), values = programs(model, (x,), [{**options, "plan": tmp_path / "plan.json"}])
    assert travelling(program) == list(ways)
    assert program.plan.graphs == told(program, ways).graphs
    others = [[torch.randn_like(v) if v is x else v for v in values]] * (program.mesh.batches - 1)
    found = verify_program(program, values, others=others)
    assert found.worst_by_norm[1] < 1e-5
    text = program.explain(200)
    assert "weights gathered on ep" in text and "charged: rows " in text


def test_options_and_plans_of_other_meshes() -> None:
    """An option says it of all mixtures but those that a plan file names; a plan of a mesh without
    ep leaves it open, and one of a mesh with ep is followed on a mesh without."""
    build = builder(Layers(), (torch.randn(24, 8),))
    for way in (ROWS, WEIGHTS):
        assert travelling(build(TWO, planner={"ep_exchange": way})) == [way, way]
    free = build(TWO)
    mixed = told(free, (ROWS, WEIGHTS))
    assert travelling(build(TWO, plan=mixed, planner={"ep_exchange": ROWS})) == [ROWS, WEIGHTS]
    without = build({"dp_shard": 2, "tp": 2}, plan=mixed)
    strategies = [without.decisions.strategies[node] for node in mixtures(without)]
    chosen = [free.decisions.strategies[node] for node in mixtures(free)]
    assert strategies == [replace_way(one) for one in chosen]
    assert travelling(build(TWO, plan=without.plan, planner={"ep_exchange": ROWS})) == [ROWS, ROWS]


@pytest.mark.parametrize(("tokens", "way"), [(32, ROWS), (65536, WEIGHTS)])
@pytest.mark.parametrize("mesh", [{"ep": 4}, {"ep": 2, "tp": 2}])
def test_few_tokens_travel_and_small_experts_do(
    mesh: dict[str, int], tokens: int, way: str
) -> None:
    with torch.device("meta"):
        model = Mixture(experts=8, hidden=512, inner=1024)
        build = builder(model, (torch.empty(tokens, 512),))
    program = build(mesh, hardware_name="h100")
    assert travelling(program) == [way]
    other = {ROWS: WEIGHTS, WEIGHTS: ROWS}[way]
    (charged,) = program.decisions.on_ep.values()
    assert charged[way] < charged[other]


def test_with_cp_and_tp_all_three_are_one_problem() -> None:
    """The plan of tp on a rank of cp, with what travels over ep, costs what both axes planned
    together cost at least."""
    build = builder(Layers(), (torch.randn(64, 8),))
    seen = set()
    for options in ({}, {"planner": {"ep_exchange": ROWS}}, {"planner": {"ep_exchange": WEIGHTS}}):
        program = build({"ep": 2, "cp": 2, "tp": 2}, **options)
        assert program.outer is not None and program.outer.bound is not None
        assert program.decisions.seconds == pytest.approx(program.outer.bound, rel=1e-6)
        seen.add(program.outer.bound)
    assert len(seen) > 1
