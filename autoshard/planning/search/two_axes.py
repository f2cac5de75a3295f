"""Two axes of a graph planned together: pairs of states, exact, with the least that any two plans
cost.

There is a variable for each node's pair of strategies, and for shared values' copies on either
axis. The costs are what the planner of the inner axis charges on the graph that the outer plan
leaves a rank: so the least sum is the least that both plans can cost, one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import fx

from autoshard.planning.context_parallel import BALANCED, HeadTail, unequal
from autoshard.planning.cost import Machine
from autoshard.planning.decisions import Decisions, Origin
from autoshard.planning.expert_axis import STACKS
from autoshard.planning.mixtures import is_mixture
from autoshard.planning.prices import Prices
from autoshard.planning.problem import Builder, Problem
from autoshard.planning.search.asked import Request, builder_of, fingerprint, may_be_sharded
from autoshard.planning.search.one_axis import dearer, decided, of_a_byte
from autoshard.planning.search.pairs import (
    HeldValue,
    OuterCopy,
    Parts,
    Produced,
    StatePair,
    ValueTables,
)
from autoshard.planning.solver import FactorGraph, Solution, TooWide, fill_order
from autoshard.planning.strategy import Strategy, operands, value
from autoshard.planning.values import differentiable, output_state, producer, shardable
from autoshard.runtime.collectives import I, State
from autoshard.runtime.graph_meta import MUTATED, WITHOUT_GRADIENTS

MOST_ENTRIES = 2**27
MOST_WORK = 2**36
"""Table entries in one, and in all; equal tables, those of equal layers, are computed once."""

# A reader: its variable, and the pair that each of its strategies wants.
_PairReader = tuple[int, list[StatePair]]


# The pairs of strategies of a node, and all that the inner axis offers beside the first.
_Results = list[tuple[Strategy, Strategy, list[Strategy]]]


def _graph() -> FactorGraph:
    return FactorGraph(MOST_ENTRIES, MOST_WORK, fill_order)


@dataclass(kw_only=True)
class JointProblem:
    """The variables of one graph on two axes and how to read a solution, for the outer one."""

    graph: FactorGraph = field(default_factory=_graph)
    domains: dict[fx.Node, list[tuple[Strategy, Strategy]]] = field(default_factory=dict)
    variables: dict[fx.Node, int] = field(default_factory=dict)
    copy_domains: dict[fx.Node, list[OuterCopy]] = field(default_factory=dict)
    copies: dict[fx.Node, int] = field(default_factory=dict)
    outputs: list[tuple[int, list[StatePair]] | None] = field(default_factory=list)

    def read(
        self, solution: Solution, outer: Problem
    ) -> tuple[dict[fx.Node, Strategy], dict[fx.Node, State], list[State]]:
        """Of the outer axis: the strategy of each node, the state of each copy, of each output."""
        at = solution.assignment
        chosen = {node: self.domains[node][at[i]][0] for node, i in self.variables.items()}
        copies = {}
        for node in outer.copies:
            owner, index = producer(node)
            copy = self.copy_domains[node][at[self.copies[node]]] if node in self.copies else None
            copies[node] = copy[0] if copy else output_state(chosen[owner], index)
        outputs = [I if entry is None else entry[1][at[entry[0]]][0] for entry in self.outputs]
        return chosen, copies, outputs


@dataclass(eq=False)
class JointBuilder:
    """Builds the JointProblem of a graph.

    outer, inner: the builders of each axis's own problem on the serial graph, the first one built,
    into `alone`; `inner` knows the prices of the outer axis (`Origin`). sharded: whether each
    output may leave as a shard of the inner axis.
    """

    outer: Builder
    alone: Problem
    inner: Builder
    parts: Parts
    sharded: Sequence[bool]

    def __post_init__(self) -> None:
        assert self.inner.origin is not None
        self.origin, self.problem = self.inner.origin, JointProblem()
        self._local: dict[tuple[Any, ...], fx.Node] = {}
        self._tables: dict[tuple[Any, ...], ValueTables] = {}
        self._results: dict[fx.Node, _Results] = {}
        self._known: dict[tuple[Any, ...], tuple[_Results, list[float]]] = {}

    def build(self) -> JointProblem:
        """All variables first, then the factors along every edge."""
        problem, uses = self.problem, dict[fx.Node, list[_PairReader]]()
        for node in self.alone.variables:
            self._variable(node)
        for node, variable in problem.variables.items():
            for position, source in enumerate(operands(node)):
                wanted = [
                    (a.inputs[position], b.inputs[position]) for a, b in problem.domains[node]
                ]
                uses.setdefault(source, []).append((variable, wanted))
        self._outputs(uses)
        for source in self.outer.gm.graph.nodes:
            if source in uses:
                self._edges(source, uses[source])
        for node in problem.variables if self.inner.stacks is not None else ():
            self._stacks(node)
        return problem

    # Variables

    def _variable(self, node: fx.Node) -> None:
        if node.op == "call_function" and not is_mixture(node):
            reads, written = self.inner.memory(node, [])  # with which kernels are fused
            domain = id(self.alone.domains[node])
            key = (self.outer.signature(node), domain, tuple(reads), written)
            if key not in self._known:
                self._known[key] = self._pairs(node)
            found, seconds = self._known[key]
        else:
            found, seconds = self._pairs(node)
        self._results[node] = found
        self.problem.domains[node] = [(first, second) for first, second, _ in found]
        variable = self.problem.graph.variable(len(found), np.array(seconds), node.name)
        self.problem.variables[node] = variable

    def _pairs(self, node: fx.Node) -> tuple[_Results, list[float]]:
        found, seconds = _Results(), list[float]()
        for first in self.alone.domains[node]:
            local = self._on_rank(node, first)
            domain, costs = self._offers(local, node)
            found += [(first, second, domain) for second in domain]
            seconds += list(costs)
        return found, seconds

    def _on_rank(self, node: fx.Node, strategy: Strategy) -> fx.Node:
        """What a rank of the outer axis runs for `node`, or takes as an input."""
        if node.op != "call_function":
            return node
        if not self.outer.contiguous and unequal(node, strategy):
            strategy = strategy._replace(impl=BALANCED[strategy.impl])
        key = (self.outer.signature(node), strategy)
        if key not in self._local:
            self._local[key] = self.parts.operator(node, strategy)
        return self._local[key]

    def _offers(self, local: fx.Node, node: fx.Node) -> tuple[list[Strategy], Sequence[float]]:
        """What the inner axis offers a node of a rank's graph that stands for `node`."""
        self.origin.nodes[local] = node
        of = self.parts.operand_of
        known = {one: self.outer.is_weighted(of[one]) for one in local.all_input_nodes if one in of}
        domain, costs = self.inner.offers(local, known)
        return domain, costs  # type: ignore[return-value]

    def _outputs(self, uses: dict[fx.Node, list[_PairReader]]) -> None:
        results: Any = self.outer.gm.graph.output_node().args[0]
        first = self.alone.outputs
        for i, (result, entry) in enumerate(zip(results, first, strict=True)):
            if entry is None:
                self.problem.outputs.append(None)
                continue
            held, (_, states) = self._held(result), entry
            domain = [(a, b) for a in states for b in self._leaving(i, result, a)]
            costs = np.zeros(len(domain))
            if self.inner.outputs_read and not self.outer.is_for_a_later_call(result):
                costs = np.array([held.price(a, I) + held.inside(a, b, I) for a, b in domain])
            variable = self.problem.graph.variable(len(domain), costs, "output")
            self.problem.outputs.append((variable, domain))
            uses.setdefault(result, []).append((variable, domain))

    def _leaving(self, i: int, result: fx.Node, outer: State) -> list[State]:
        if not self.sharded[i]:
            return [I]
        return [I, *shardable(self.parts.tensor(value(result), outer), self.inner.n)]

    # Edges

    def _edges(self, source: fx.Node, uses: list[_PairReader]) -> None:
        graph, diff = self.problem.graph, self.outer.prices.moved(source).diff
        owner, index = producer(source)
        x, tables = self.problem.variables[owner], self._tables_of(source, len(uses))
        made = self._made(source, owner, index, shared=diff and len(uses) > 1)
        if len(uses) == 1 or not self.outer.is_weighted(source):
            for variable, wanted in uses:
                if len(made) > 1 or len(wanted) > 1 or made[0][:2] != wanted[0]:
                    graph.add((x, variable), tables.direct(made, wanted))
            return
        outer = self._outer_copies(source, made, uses, tables.held)
        c = graph.variable(len(outer), None, f"copy of {source.name}")
        self.problem.copies[source], self.problem.copy_domains[source] = c, outer
        if not diff:
            graph.add((x, c), tables.outer_copy(made, (), outer))
            for variable, wanted in uses:
                graph.add((x, variable, c), tables.reader(made, wanted, (), outer))
            return
        inner = sorted({state for one in made for state in one.shares})
        k = graph.variable(len(inner), None, f"inner copy of {source.name}")
        graph.add((x, k), tables.inner_copy(made, inner))
        graph.add((x, k, c), tables.outer_copy(made, inner, outer))
        for variable, wanted in uses:
            graph.add((x, variable, k, c), tables.reader(made, wanted, inner, outer))

    def _stacks(self, node: fx.Node) -> None:
        """What ep adds to the way of its stacks to a mixture of experts."""
        domain, tables = [second for _, second in self.problem.domains[node]], self.inner.stacks
        if tables is None or not any(one.on_ep for one in domain):
            return
        for position, stack in enumerate(operands(node)[STACKS:], STACKS):
            have = [output_state(second, None) for _, second in self.problem.domains[stack]]
            added = tables.added(node, position, have, domain)
            at = (self.problem.variables[stack], self.problem.variables[node])
            self.problem.graph.add(at, added)

    def _made(
        self, source: fx.Node, owner: fx.Node, index: int | None, shared: bool
    ) -> list[Produced]:
        held, found = self._held(source), []
        shares: dict[int, tuple[State, ...]] = {}
        for first, second, domain in self._results[owner]:
            own = output_state(first, index)
            if shared and id(domain) not in shares:
                states = {*held.shares(own), *(output_state(one, index) for one in domain)}
                shares[id(domain)] = tuple(sorted(states))
            copies = shares[id(domain)] if shared else ()
            found.append(Produced(own, output_state(second, index), copies))
        return found

    def _outer_copies(
        self, source: fx.Node, made: list[Produced], uses: list[_PairReader], held: HeldValue
    ) -> list[OuterCopy]:
        """The other outer states in which the value may be held for several readers."""
        own = {one.outer for one in made}
        states = {a for _, wanted in uses for a, _ in wanted}
        states |= set(self.alone.copy_domains.get(source, ()))
        found: dict[StatePair, None] = {}
        for state in sorted(states):
            for start in sorted(own):
                if not held.same(start, state):
                    found.update(dict.fromkeys((state, t) for t, _ in held.passed(start, state)))
        return [None, *found]

    def _held(self, source: fx.Node) -> HeldValue:
        return self._tables_of(source, 2).held

    def _tables_of(self, source: fx.Node, readers: int) -> ValueTables:
        val, prices = value(source), self.outer.prices
        assert isinstance(val, torch.Tensor)
        own = (prices.moved(source), self.inner.prices.moved(source))
        key = (tuple(val.shape), val.dtype, *own, self.outer.is_weighted(source))
        planned = source in self.alone.copies
        if key not in self._tables:
            held = HeldValue(source, self.outer, self.inner, self.parts, self._offers)
            self._tables[key] = ValueTables(held, False, 2)
        whole = (*key, planned, readers)
        if whole not in self._tables:
            self._tables[whole] = ValueTables(self._tables[key].held, planned, readers)
        return self._tables[whole]


@dataclass(frozen=True, kw_only=True)
class TwoAxes:
    """What is asked of two axes of one graph: the requests of both, by its placeholders, and the
    ranks of each. parts: makes the nodes of a rank of the outer axis."""

    outer: Request
    inner: Request
    ranks: tuple[int, int]
    parts: Parts


def plan_both(
    gm: fx.GraphModule, machine: Machine, asked: TwoAxes, prices: Prices | None = None
) -> Decisions | None:
    """The outer plan of the cheapest two; its `seconds` are the least that any two plans cost, by
    what the planner of the inner axis charges on a rank's graph. prices: of bytes, on both axes.

    None where one axis is planned after the other: a graph without gradients, or that writes to its
    inputs, or with symbolic sizes, or that is too entangled, or whose plan is given.
    """
    plan = asked.outer.plan
    given = plan is not None and fingerprint(gm) in plan.graphs
    return None if given or not _is_plain(gm) else _solve(gm, machine, asked, prices or Prices())


def both_at_dearer_bytes(
    gm: fx.GraphModule, machine: Machine, asked: TwoAxes, default: Decisions, byte: float
) -> Iterator[Decisions]:
    """Other outer plans than `default`, each of the cheapest two at a price of a byte above `byte`,
    for a rank that has less memory than those take; each once."""
    known = [default.graph_plan()]
    for price in dearer(byte):
        found = plan_both(gm, machine, asked, of_a_byte(price, machine))
        if found is not None and (plan := found.graph_plan()) not in known:
            known.append(plan)
            yield found


def _solve(
    gm: fx.GraphModule,
    machine: Machine,
    asked: TwoAxes,
    prices: Prices,
    contiguous: bool = False,
) -> Decisions | None:
    n, m = asked.ranks
    outer = builder_of(gm, n, machine, asked.outer, prices, contiguous)
    alone = outer.build()
    origin = Origin(gm, outer.prices)
    inner = builder_of(gm, m, machine, asked.inner, prices, origin=origin)
    results = gm.graph.output_node().args[0]
    sharded = [may_be_sharded(gm, i, one, asked.inner) for i, one in enumerate(results)]  # type: ignore[arg-type, union-attr]
    problem = JointBuilder(outer, alone, inner, asked.parts, sharded).build()
    try:
        solution = problem.graph.solve()
    except TooWide:
        return None
    read = problem.read(solution, alone)
    ordered = HeadTail(gm.graph, n, *read, asked.outer.contiguous_outputs)
    if ordered.unbalanced and not contiguous:  # which costs more than was thought
        return _solve(gm, machine, asked, prices, contiguous=True)
    variables = len(problem.variables) + len(problem.copies)
    return decided(ordered, alone, solution, variables, outer.prices, asked.outer)


def _is_plain(gm: fx.GraphModule) -> bool:
    nodes = list(gm.graph.nodes)
    if gm.meta.get(MUTATED) or gm.meta.get(WITHOUT_GRADIENTS):
        return False
    if not any(map(differentiable, nodes)):
        return False
    values = [value(node) for node in nodes]
    tensors = [one for one in values if isinstance(one, torch.Tensor)]
    symbols = any(isinstance(one, (torch.SymInt, torch.SymFloat, torch.SymBool)) for one in values)
    return not symbols and all(isinstance(e, int) for one in tensors for e in one.shape)
