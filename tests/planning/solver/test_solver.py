"""The solver against brute force; its determinism, its growth, its errors."""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys
from typing import Any

import networkx as nx
import numpy as np
import pytest
from networkx.algorithms.approximation import treewidth_min_degree

from autoshard.planning.solver import elimination, factor_graph, mini_buckets
from autoshard.planning.solver.elimination import Elimination, elimination_order, fill_order
from autoshard.planning.solver.factor_graph import FactorGraph, Infeasible, TooWide

Factor = tuple[tuple[int, ...], np.ndarray]


def random_problem(seed: int) -> tuple[list[int], list[np.ndarray], list[Factor]]:
    rng = np.random.default_rng(seed)
    sizes = [int(rng.integers(1, 5)) for _ in range(rng.integers(1, 8))]
    unary = [table(rng, (size,)) for size in sizes]
    factors = []
    for _ in range(rng.integers(0, 12)):
        arity = int(rng.integers(1, 4))
        # With replacement: a factor may name a variable twice.
        scope = tuple(int(v) for v in rng.integers(0, len(sizes), arity))
        factors.append((scope, table(rng, tuple(sizes[v] for v in scope))))
    return sizes, unary, factors


def table(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    # Few distinct values, so that ties are common; negative ones too.
    cost = rng.integers(-3, 6, shape).astype(float)
    cost[rng.random(shape) < 0.2] = np.inf
    return cost


def build(
    sizes: list[int], unary: list[np.ndarray], factors: list[Factor], **limits: Any
) -> FactorGraph:
    graph = FactorGraph(**limits)
    for size, cost in zip(sizes, unary, strict=True):
        graph.variable(size, cost)
    for scope, cost in factors:
        graph.add(scope, cost)
    return graph


def total(assignment: tuple[int, ...], unary: list[np.ndarray], factors: list[Factor]) -> float:
    cost = sum(float(u[a]) for u, a in zip(unary, assignment, strict=True))
    return cost + sum(float(t[tuple(assignment[v] for v in scope)]) for scope, t in factors)


def brute_force(sizes: list[int], unary: list[np.ndarray], factors: list[Factor]) -> float:
    return min(total(a, unary, factors) for a in itertools.product(*map(range, sizes)))


@pytest.mark.parametrize(
    "limits",
    [{}, {"table_limit": 6}, {"order": fill_order}],
    ids=["elimination", "branching", "min-fill"],
)
def test_optimal_on_random_graphs(monkeypatch: pytest.MonkeyPatch, limits: dict[str, Any]) -> None:
    feasible = branched = 0
    runs: list[Elimination] = []

    def run(*given: Any) -> Elimination:
        runs.append(Elimination(*given))
        return runs[-1]

    monkeypatch.setattr(factor_graph, "Elimination", run)
    for seed in range(400):
        sizes, unary, factors = random_problem(seed)
        best = brute_force(sizes, unary, factors)
        graph = build(sizes, unary, factors, **limits)
        if math.isinf(best):
            with pytest.raises(Infeasible):
                graph.solve()
            continue
        runs.clear()
        solution = graph.solve()
        assert solution.cost == best
        assert total(tuple(solution.assignment), unary, factors) == best
        feasible += 1
        branched += len(runs) > 1
    assert 100 < feasible < 400
    assert (branched > 20) == ("table_limit" in limits)


def test_mini_buckets_bound_the_minimum(monkeypatch: pytest.MonkeyPatch) -> None:
    """However small they are; and say where they have found it."""
    found = proved = 0
    for limits in ((1,), (20,), (1, 20, 2**14), (2**14,)):
        monkeypatch.setattr(factor_graph, "_PARTS", limits)
        for seed in range(200):
            sizes, unary, factors = random_problem(seed)
            best = brute_force(sizes, unary, factors)
            if math.isinf(best):
                continue
            bounded = build(sizes, unary, factors).bounded()
            assert bounded is not None
            cost = total(tuple(bounded.assignment), unary, factors)
            assert best <= cost == bounded.cost <= best + bounded.gap + 1e-9
            if limits == (2**14,):  # no table is in parts
                whole = build(sizes, unary, factors).solve()
                assert (bounded.width, bounded.gap) == (whole.width, 0)
            found, proved = found + 1, proved + (bounded.gap == 0)
    assert 0 < proved < found and found > 200


@pytest.mark.parametrize("seed", range(10))
def test_another_value_costs_what_it_does_from_scratch(seed: int) -> None:
    """And computes again only what it reaches: in a chain with chords, what comes later."""
    rng = np.random.default_rng(seed)
    pairs = [(i, i + 1) for i in range(99)] + [(i, i + 30) for i in range(0, 60, 25)]
    rng.shuffle(pairs)
    factors = [elimination.Factor(pair, table(rng, (4, 4))) for pair in pairs]
    fixed = {v: int(rng.integers(4)) for v in range(0, 60, 25)}
    order, _ = elimination_order([4] * 100, pairs, without=tuple(fixed))
    run, whole = mini_buckets._Conditioned(factors, order, fixed), 0
    for variable, value in rng.permutation(list(itertools.product(fixed, range(4)))).tolist():
        before, old, tried = run.cost, run.fixed, run.fixed | {variable: value}
        scratch = Elimination(elimination.condition(factors, tried), order)
        run.try_value(variable, value)
        whole += scratch.work
        assert run.cost == min(before, scratch.cost) or (before, scratch.cost) == (math.inf,) * 2
        assert run.fixed == (tried if scratch.cost < before else old)
    chosen = run.assignment() | run.fixed
    found = sum(float(f.table[tuple(chosen[v] for v in f.scope)]) for f in factors)
    assert found == run.cost or math.isinf(run.cost)
    assert scratch.work < run.work < 0.7 * whole


def unrolled(steps: int) -> FactorGraph:
    """A recurrence that is unrolled: each step reads weights that all share, so that the exact
    elimination joins all of them in one table."""
    rng = np.random.default_rng(0)
    graph = FactorGraph()
    weights = [graph.variable(6, rng.random(6) * steps) for _ in range(12)]
    reads = [rng.random((6, 6)) for _ in weights]
    moves, state = rng.random((6, 6)), graph.variable(6)
    for _ in range(steps):
        before, state = state, graph.variable(6)
        graph.add((before, state), moves)
        for weight, cost in zip(weights, reads, strict=True):
            made = graph.variable(6)
            graph.add((weight, made), cost)
            graph.add((made, state), moves)
    return graph


def test_an_unrolled_recurrence_takes_work_in_its_length() -> None:
    with pytest.raises(TooWide):
        unrolled(16).solve()
    found = [unrolled(steps).bounded() for steps in (8, 16, 32)]
    assert [one and one.gap for one in found] == [0.0] * 3
    few, more, most = (one.work for one in found if one is not None)
    assert most < 2**20 and 1.9 < (most - more) / (more - few) < 2.1


def layers(count: int, seed: int = 0) -> FactorGraph:
    """A residual stream with a shared copy for q, k and v, and two tables every layer reads."""
    rng = np.random.default_rng(seed)
    graph = FactorGraph()
    sizes: list[int] = []

    def variable() -> int:
        sizes.append(6)
        return graph.variable(6)

    def factor(*scope: int) -> None:
        cost = rng.random([sizes[v] for v in scope])
        cost[rng.random(cost.shape) < 0.2] = np.inf
        cost[(0,) * len(scope)] = 1.0
        graph.add(scope, cost)

    def op(*inputs: int) -> int:
        output = variable()
        for source in inputs:
            factor(source, output)
        return output

    mask, rotary, stream = variable(), variable(), variable()
    for _ in range(count):
        copy = op(stream)
        heads = []
        for _ in range(3):
            head = op(rotary, variable())
            factor(stream, copy, head)
            heads.append(op(head))
        attention = op(*heads, mask)
        projected = op(op(attention), variable())
        stream = op(projected, stream)
    return graph


def test_what_layers_have_in_common_is_eliminated_once() -> None:
    """Tables that are one array: what hangs on a chain costs nothing more with depth."""
    rng = np.random.default_rng(0)
    edge, inside = rng.random((5, 5)), rng.random((5, 3))

    def chain(count: int, shared: bool) -> tuple[float, int]:
        graph = FactorGraph()
        last = graph.variable(5)
        for _ in range(count):
            here, within = graph.variable(5), graph.variable(3)
            graph.add((last, here), edge if shared else edge.copy())
            graph.add((here, within), inside if shared else inside.copy())
            last = here
        return graph.solve().cost, len(graph._repeated._known)

    apart, once = ([chain(n, shared) for n in (16, 32)] for shared in (False, True))
    assert [cost for cost, _ in once] == [cost for cost, _ in apart]
    assert apart[1][1] - apart[0][1] == 2 * 16
    assert once[1][1] - once[0][1] == 16


def test_work_grows_linearly_with_depth() -> None:
    work = {count: layers(count).solve().work for count in (8, 16, 32, 64)}
    per_layer = [(work[2 * n] - work[n]) / n for n in (8, 16, 32)]
    assert all(one < 1.3 * min(per_layer) for one in per_layer), work
    assert layers(64).solve().width <= layers(8).solve().width + 1


def test_width_is_no_worse_than_the_usual_heuristic() -> None:
    graph = layers(8)
    primal = nx.Graph()
    for scope in graph._tables:
        primal.add_edges_from(itertools.combinations(scope, 2))
    yardstick, _ = treewidth_min_degree(primal)
    _, buckets = elimination_order(graph._sizes, list(graph._tables))
    # All domains are equal here, so the least table is the least degree.
    assert max(map(len, buckets)) <= yardstick + 1


def test_order_prefers_small_tables_to_few_neighbours() -> None:
    # 0 has two neighbours of 50 values, 1 has three of 2: degree would take 0 first.
    sizes = [4, 4, 50, 50, 2, 2, 2]
    scopes = [(0, 2), (0, 3), (1, 4), (1, 5), (1, 6), (2, 3), (2, 4), (3, 5), (2, 5), (3, 6)]
    order, _ = elimination_order(sizes, scopes)
    assert order.index(1) < order.index(0)


@pytest.mark.parametrize("by", [elimination_order, fill_order])
def test_orders_are_those_that_their_definitions_make(by: Any) -> None:
    """Each time from all that is left: by the table, or by the pairs that it joins and the table;
    the lower index of equals."""
    for seed in range(60):
        rng = np.random.default_rng(seed)
        sizes = rng.integers(1, 6, 14).tolist()
        scopes = [tuple(sorted(rng.choice(14, 3, replace=False).tolist())) for _ in range(9)]
        without = tuple(rng.choice(14, 2, replace=False).tolist())
        graph = nx.Graph()
        graph.add_nodes_from(v for v in range(14) if v not in without)
        for scope in scopes:
            graph.add_edges_from(itertools.combinations([v for v in scope if v not in without], 2))
        order, tables = by(sizes, scopes, without)
        assert sorted(order) == sorted(graph)
        for variable, made in zip(order, tables, strict=True):
            costs = {v: cost_of_order(graph, sizes, v, by is fill_order) for v in graph}
            assert variable == min(graph, key=lambda v: (costs[v], v)), seed  # noqa: B023
            near = sorted(graph[variable])
            assert made == (variable, *near)
            graph.remove_node(variable)
            graph.add_edges_from(itertools.combinations(near, 2))


def cost_of_order(graph: nx.Graph, sizes: list[int], v: int, fills: bool) -> tuple[int, int]:
    """What eliminating a variable costs: the pairs that are joined, and the table."""
    bits = [round(math.log2(size) * elimination.LOG_UNIT) for size in sizes]
    pairs = itertools.combinations(graph[v], 2)
    fill = sum(bits[a] + bits[b] for a, b in pairs if not graph.has_edge(a, b))
    return fill * fills, bits[v] + sum(bits[a] for a in graph[v])


def test_a_hub_of_every_layer_adds_one_to_the_width() -> None:
    rng = np.random.default_rng(0)
    graph = FactorGraph()
    hub = graph.variable(5)
    chain = [graph.variable(5) for _ in range(2000)]
    for left, right in itertools.pairwise(chain):
        graph.add((left, right), rng.random((5, 5)))
        graph.add((hub, right), rng.random((5, 5)))
    solution = graph.solve()
    assert solution.width == 3
    assert solution.work < 2000 * 5**3 + 100


FINGERPRINT = """
import sys
sys.path.insert(0, {folder!r})
from test_solver import build, layers, random_problem
print(layers(6).solve().assignment)
for seed in range(60):
    try:
        print(build(*random_problem(seed)).solve().assignment)
    except ValueError as error:
        print(error)
"""


def test_the_same_in_every_process() -> None:
    code = FINGERPRINT.format(folder=os.path.dirname(__file__))
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "31")
    }
    assert len(outputs) == 1
    assert outputs.pop().count("\n") == 61


def test_ties_go_to_the_first_value() -> None:
    graph = FactorGraph()
    a, b = graph.variable(3), graph.variable(3)
    graph.add((a, b), np.zeros((3, 3)))
    assert graph.solve().assignment == [0, 0]


def test_no_variables() -> None:
    solution = FactorGraph().solve()
    assert (solution.assignment, solution.cost) == ([], 0.0)


def test_infeasible_names_the_factor_and_the_variable() -> None:
    graph = FactorGraph()
    a = graph.variable(2, name="weight")
    b = graph.variable(2, name="linear_3")
    graph.add((a, b), np.array([[np.inf, np.inf], [0.0, np.inf]]), name="weight -> linear_3")
    graph.add((b,), np.array([np.inf, 0.0]), name="mark on linear_3")
    with pytest.raises(Infeasible, match=r"no value of \w+ is left") as error:
        graph.solve()
    assert "linear_3" in str(error.value)


def test_infeasible_beyond_single_factors_names_the_contradiction() -> None:
    # A triangle of "differs from" over two values: every pair is possible, all three are not.
    graph = FactorGraph()
    corners = [graph.variable(2, name=f"corner {i}") for i in range(3)]
    differs = np.array([[np.inf, 0.0], [0.0, np.inf]])
    for pair in itertools.combinations(corners, 2):
        graph.add(pair, differs)
    with pytest.raises(Infeasible, match="contradiction is between corner"):
        graph.solve()


def test_too_wide_says_the_numbers() -> None:
    graph = FactorGraph(table_limit=2**10, work_limit=2**20)
    variables = [graph.variable(8, name=f"v{i}") for i in range(14)]
    for pair in itertools.combinations(variables, 2):
        graph.add(pair, np.zeros((8, 8)))
    with pytest.raises(TooWide, match=r"branches of .* table entries, more than 1.05e\+06"):
        graph.solve()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda g: g.variable(0, name="empty"), "empty has no values"),
        (lambda g: g.variable(2, np.zeros(3), "x"), r"x: costs have shape \(3,\)"),
        (lambda g: g.variable(1, np.array([np.nan])), "not NaN"),
        (lambda g: g.add((0,), np.array([-np.inf, 0.0])), "not NaN or -inf"),
        (lambda g: g.add((), np.array(1.0)), "at least one variable"),
    ],
)
def test_bad_input(call: object, message: str) -> None:
    graph = FactorGraph()
    graph.variable(2)
    with pytest.raises(ValueError, match=message):
        call(graph)  # type: ignore[operator]
