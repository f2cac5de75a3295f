"""From a captured graph to a factor graph: a variable for each decision, tables of costs.

One variable a node chooses its strategy; one variable a shared value chooses the state of its
*copy*, so that q, k and v pay for one gather and one summed gradient. A factor on
(producer, copy, consumer) charges a consumer the cheaper of two routes: from the producer, or
from the copy. Everything is ordered by the position of the node in the graph, so that every
rank builds the same problem.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import fx

from autoshard.planning import cost, rules
from autoshard.planning.context_parallel import (
    BALANCED,
    WeightsOnly,
    along_the_sequence,
    contiguously,
    stored_by_rows,
    with_heads_as_one,
)
from autoshard.planning.cost import OperatorWork, tensor_bytes
from autoshard.planning.decisions import Origin
from autoshard.planning.expert_axis import ExpertAxis, StackTables
from autoshard.planning.fusion import Kernels
from autoshard.planning.mixtures import inner_bytes
from autoshard.planning.operators import LOOKUPS, cached, is_handed_on, packet
from autoshard.planning.prices import AxisPrices
from autoshard.planning.solver import FactorGraph, Solution
from autoshard.planning.strategy import Strategy, operands, parts_of, results, value
from autoshard.planning.values import (
    as_key,
    differentiable,
    global_bytes,
    is_trained,
    output_state,
    producer,
    shardable,
    splits_evenly,
    stored_domain,
)
from autoshard.runtime.collectives import I, R, State, redistribute, shard_dim
from autoshard.runtime.graph_meta import DIFF, N_OUTPUTS, WITHOUT_GRADIENTS

# A consumer of a value: its variable, and the input state of each of its strategies.
Consumer = tuple[int, list[State]]


@dataclass(kw_only=True)
class Problem:
    """The variables of one graph and how to read a solution."""

    graph: FactorGraph = field(default_factory=FactorGraph)
    domains: dict[fx.Node, list[Strategy]] = field(default_factory=dict)
    variables: dict[fx.Node, int] = field(default_factory=dict)
    copy_domains: dict[fx.Node, list[State]] = field(default_factory=dict)
    copies: dict[fx.Node, int] = field(default_factory=dict)
    outputs: list[tuple[int, list[State]] | None] = field(default_factory=list)
    declined: dict[fx.Node, list[str]] = field(default_factory=dict)
    stacks: dict[fx.Node, list[tuple[fx.Node, np.ndarray]]] = field(default_factory=dict)
    """Of a mixture that ep may leave its stacks: these, and what ep adds to [state, strategy]."""

    def read(self, solution: Solution) -> tuple[dict[fx.Node, Strategy], dict[fx.Node, State]]:
        """(strategy of each node, state of each shared copy)."""
        chosen = {n: self.domains[n][solution.assignment[i]] for n, i in self.variables.items()}
        copies = {n: self.copy_domains[n][solution.assignment[i]] for n, i in self.copies.items()}
        return chosen, copies

    def output_states(self, solution: Solution) -> list[State]:
        """The state in which each output leaves the graph; I for what is no tensor."""
        return [
            I if entry is None else entry[1][solution.assignment[entry[0]]]
            for entry in self.outputs
        ]


@dataclass(eq=False)
class Builder:
    """Builds the Problem of one graph on one mesh axis.

    stored: the state in which each parameter is stored, None where it is free. arriving: the state
    of inputs that come back from an earlier call as shards. output_domains: the
    states in which each output may leave. outputs_read: whether the caller reads them, so that a
    sharded one costs its gather. even: whether only dims are split that the axis divides, and no
    shape depends on values.
    contiguous: whether causal attention by rows is charged the work of contiguous parts. beside:
    ranks of the axis that is planned after this one. on_ep: the axis ep, over which rows travel to
    experts or experts to rows; None: there is none. origin: of the graph of a rank of another
    axis, what it was made of.
    """

    gm: fx.GraphModule
    prices: AxisPrices
    _: KW_ONLY
    stored: Mapping[fx.Node, State | None]
    arriving: Mapping[fx.Node, State]
    output_domains: list[list[State]]
    outputs_read: bool
    even: bool = False
    contiguous: bool = False
    beside: int = 1
    on_ep: ExpertAxis | None = None
    origin: Origin | None = None

    def __post_init__(self) -> None:
        self.n, self.problem, self.inference = self.prices.n, Problem(), not is_trained(self.gm)
        self.stacks = None if self.on_ep is None else StackTables(self.on_ep, self.prices)
        # the first call of a model that generates is planned as if it trained, and has a cache too
        self.keeps_states = self.inference or bool(self.gm.meta.get(WITHOUT_GRADIENTS))
        self._tables: dict[tuple[Any, ...], np.ndarray] = {}
        self._units: dict[tuple[Any, ...], np.ndarray] = {}
        self._strategies: dict[tuple[Any, ...], tuple[list[Strategy], list[str]]] = {}
        self._weighted: dict[fx.Node, bool] = {}
        self._kernels = self.origin.kernels if self.origin else Kernels(self.gm)
        self._caches = self._cached()
        self._weights = WeightsOnly(self.stored) if self.prices.name == "cp" else None

    def build(self) -> Problem:
        """All variables first, then the factors along every edge."""
        for node in self.gm.graph.nodes:
            self._variable(node)
        self._copies_and_edges()
        return self.problem

    # Variables

    def _variable(self, node: fx.Node) -> None:
        if self._weights is not None:
            self._weights.note(node)
        if node.op == "output" or producer(node)[0] is not node:
            self._weighted[node] = self._from_weights(node)
            self._note_activation(node)
            return
        tensors = operands(node)
        is_value = isinstance(value(node), (torch.Tensor, tuple, list))
        if not tensors and not is_value:
            return
        domain, costs = self.offers(node)
        self.problem.domains[node] = domain
        self.problem.variables[node] = self.problem.graph.variable(len(domain), costs, node.name)

    def offers(
        self, node: fx.Node, weighted: Mapping[fx.Node, bool] = MappingProxyType({})
    ) -> tuple[list[Strategy], np.ndarray]:
        """The strategies that a node may use, and the seconds of each. weighted: into which of its
        operands a parameter flows, where they are no nodes of the graph."""
        self._weighted.update(weighted)
        self._weighted[node] = self._from_weights(node)
        self._note_activation(node)
        if node.op == "placeholder":
            fixed = self.stored.get(node, self.arriving.get(node, I))
            states = [fixed] if fixed is not None else stored_domain(node, self.n, self.even)
            if self._weights is not None and fixed is None:
                states = stored_by_rows(node, states)
            domain = [Strategy((), state) for state in states]
            return domain, np.array([self.prices.storage(node, state) for state in states])
        if node.op == "get_attr":
            return [Strategy((), I)], np.zeros(1)
        ways = self._ways(node)
        alike = (*self.signature(node), *ways)
        domain, declined = self._enumerate(node, ways, alike)
        if declined:
            self.problem.declined[node] = declined
        costs = self._node_costs(node, operands(node), domain, alike)
        if node in self._caches:
            whole = [shard_dim(output_state(s, None)) is None for s in domain]
            costs = costs + self.prices.held_whole() * np.array(whole)
        return domain, costs

    def _note_activation(self, node: fx.Node) -> None:
        """Without gradients, what is computed of parameters is what is moved and shared."""
        if self.inference and self._weighted[node] and node not in self.stored:
            self.prices.computed.add(node)

    def is_weighted(self, node: fx.Node) -> bool:
        """Whether a parameter flows into a node of the built graph."""
        return self._weighted[node]

    def _from_weights(self, node: fx.Node) -> bool:
        """Whether a parameter flows into the node: masks and positions are not worth sharding."""
        if node.op == "placeholder":
            return node in self.stored or node in self.arriving or differentiable(node)
        return any(self._weighted.get(source, False) for source in node.all_input_nodes)

    def signature(self, node: fx.Node) -> tuple[Any, ...]:
        """Equal for nodes that have the same strategies and costs: repeated layers share both."""
        kwargs, of = node.kwargs, self._describe_value
        described = (as_key(node.args, of), tuple(kwargs), as_key(kwargs.values(), of))
        return (node.target, *described, differentiable(node), self._weighted[node])

    def _describe_value(self, node: fx.Node) -> Any:
        val = value(node)
        if isinstance(val, torch.Tensor):
            shape = tuple(e if type(e) is int else (str(e), cost.hint(e)) for e in val.shape)
            made_of = (self._weighted.get(node), node in (self._weights or ()))
            return (shape, val.dtype, bool(node.meta.get(DIFF)), *made_of)
        return (type(val).__name__, str(val))

    def _enumerate(
        self, node: fx.Node, ways: tuple[str, ...], key: tuple[Any, ...]
    ) -> tuple[list[Strategy], list[str]]:
        if key not in self._strategies:
            found, declined = rules.strategies(node, self.n)
            if self.even:
                found = [s for s in found if splits_evenly(node, s, self.n)]
            if self.even or not self.prices.sequence_parallel:  # tokens stay whole
                found = [s for s in found if not s.waits]
            if self._weights is None:
                found = [one for one in found if one.impl not in BALANCED]
            else:
                if self.beside > 1:
                    found = with_heads_as_one(node, found, self.n, self.beside)
                found = along_the_sequence(node, found, self._weights)
                if self.contiguous:
                    found = [contiguously(node, one, self.n) for one in found]
            if not self._weighted[node] and not differentiable(node):
                found = found[:1]  # masks and positions: never worth a collective
            if ways and self.on_ep is not None:
                found = self.on_ep.each_way(node, found, ways)
            self._strategies[key] = (found, declined)
        return self._strategies[key]

    def _ways(self, node: fx.Node) -> tuple[str, ...]:
        """What may travel over ep for a mixture; nothing of any other node."""
        if self.on_ep is None:
            return ()
        return self.on_ep.ways(node, None if node.graph is self.gm.graph else self.origin)

    # Unary costs

    def _node_costs(
        self,
        node: fx.Node,
        tensors: list[fx.Node],
        domain: list[Strategy],
        alike: tuple[Any, ...],
    ) -> np.ndarray:
        """Roofline seconds of each strategy, forward and backward, as a compiler would fuse it.

        A chain of pointwise operators and reductions becomes one kernel, so it is charged for what
        it reads from elsewhere and for what is read elsewhere; a view is free (`Kernels`).
        """
        if not self._weighted[node]:
            return np.zeros(len(domain))
        if self.origin and node.target is redistribute:
            made = [s.output for s in domain]
            return np.array([self.origin.change(node, state, self.n) for state in made])  # type: ignore[arg-type]
        reads, written = self.memory(self.origin.nodes.get(node) if self.origin else node, tensors)
        key = (alike, tuple(reads), written)
        if key in self._units:
            return self._units[key]
        flops = float(cost.node_flops(node))
        diff = differentiable(node)
        dtype, sheet = cost.dtype_made(node), self.prices.machine.sheet
        sizes_out = [tensor_bytes(r) if written else 0 for r in results(node)]
        sizes_in = [global_bytes(t) if read else 0 for t, read in zip(tensors, reads)]
        if packet(node) in LOOKUPS:
            sizes_in = [min(size, sum(sizes_out)) for size in sizes_in]
        costs = []
        for strategy in domain:
            states = (*strategy.inputs, *strategy.outputs)
            sharded = any(s[0] == "S" for s in states)
            kept = sum(b / parts_of(s, self.n) for b, s in zip(sizes_out, strategy.outputs))
            inner = inner_bytes(node, strategy, self.n)
            kept += inner
            # what is inside is written and read
            read_in = [b / parts_of(s, self.n) for b, s in zip(sizes_in, strategy.inputs)]
            if self.on_ep is not None and strategy.on_ep:
                read_in = [b / self.on_ep.read(strategy, i) for i, b in enumerate(read_in)]
            moved = kept + inner + sum(read_in)
            own = flops * strategy.share / self.n if sharded else flops
            seconds = sheet.seconds(OperatorWork(own, moved, dtype))
            if diff:
                seconds = 3 * seconds + kept * self.prices.activation_byte
            seconds += strategy.waits * cost.WAIT_SECONDS
            seconds += sum(
                cost.collective_seconds(t.op, t.nbytes, t.n or self.n, self.prices.link_of(t.axis))
                for t in strategy.traffic
                if diff or not t.backward
            )
            seconds += self.on_ep.rows(node, strategy) if self.on_ep else 0.0
            # where R and I cost the same, I is easier to read; a free view is taken of a shard
            costs.append(seconds + 1e-12 * states.count(R) + 1e-13 * (not sharded))
        self._units[key] = np.array(costs)
        return self._units[key]

    def memory(self, node: fx.Node | None, tensors: list[fx.Node]) -> tuple[list[bool], bool]:
        """Which operands the kernel of a node reads from memory, and whether it writes there."""
        if node is None:  # of no node of the serial graph
            return [True] * len(tensors), True
        bases = self._kernels.reads(node)
        read = [self._kernels.base[tensor] in bases for tensor in operands(node)]
        return read, self._kernels.writes(node)

    # Edges

    def _copies_and_edges(self) -> None:
        problem = self.problem
        uses: dict[fx.Node, list[Consumer]] = {}
        order = [n for n in self.gm.graph.nodes if n in problem.variables]
        for node in order:
            for position, source in enumerate(operands(node)):
                wanted = [s.inputs[position] for s in problem.domains[node]]
                uses.setdefault(source, []).append((problem.variables[node], wanted))
        self._output_uses(uses)
        for source in self.gm.graph.nodes:
            if source in uses:
                self._edges(source, uses[source])
        for node in order if self.on_ep is not None else ():
            if self._ways(node):
                self._stacks(node)

    def _stacks(self, node: fx.Node) -> None:
        problem, found = self.problem, self.problem.stacks.setdefault(node, [])
        assert self.stacks is not None
        for stack, added in self.stacks.of_mixture(node, problem.domains):
            problem.graph.add((problem.variables[stack], problem.variables[node]), added)
            found.append((stack, added))

    def _output_uses(self, uses: dict[fx.Node, list[Consumer]]) -> None:
        returned: Any = self.gm.graph.output_node().args[0]
        for i, (result, domain) in enumerate(zip(returned, self.output_domains)):
            if isinstance(result, fx.Node) and isinstance(value(result), torch.Tensor):
                costs = np.zeros(len(domain))
                if self.outputs_read and not self.is_for_a_later_call(result):
                    price = self.prices.change_cost(result)
                    costs = np.array([price(state, I) for state in domain])
                    costs += self.origin.read_out[i] if self.origin else 0.0
                variable = self.problem.graph.variable(len(domain), costs, "output")
                self.problem.outputs.append((variable, domain))
                uses.setdefault(result, []).append((variable, domain))
            else:
                self.problem.outputs.append(None)

    def is_for_a_later_call(self, result: fx.Node) -> bool:
        """Whether an output is not read between two calls."""
        return cached(result) is not None or (self.keeps_states and is_handed_on(result))

    def _cached(self) -> set[fx.Node]:
        """The keys and values that a model which generates keeps between calls."""
        returned: Any = self.gm.graph.output_node().args[0]
        outputs = [one for one in returned[: self.gm.meta[N_OUTPUTS]] if isinstance(one, fx.Node)]
        found = {cached(one) for one in outputs if self.keeps_states}
        return {one for one in found if one is not None and one.op != "placeholder"}

    def _edges(self, source: fx.Node, uses: list[Consumer]) -> None:
        problem = self.problem
        owner, index = producer(source)
        have = [output_state(s, index) for s in problem.domains[owner]]
        x = problem.variables[owner]
        moved, diff = self.prices.moved(source), differentiable(source)

        def matrix(src: list[State], dst: list[State]) -> np.ndarray:
            key = ("m", tuple(src), tuple(dst), moved)
            if key not in self._tables:
                self._tables[key] = np.array(
                    [[self.prices.change(a, b, moved) for b in dst] for a in src]
                )
            return self._tables[key]

        wanted = sorted({state for _, states in uses for state in states})
        moves = diff or source in self.prices.computed
        several = self.origin.is_shared(source) if self.origin else len(uses) > 1
        share = several and moves and not (have == [I] and wanted == [I])
        if not share:
            for variable, states in uses:
                if len(have) > 1 or len(states) > 1 or have != states:
                    problem.graph.add((x, variable), matrix(have, states))
            return
        # an unused copy costs nothing: it may stay in any state of its producer
        split = [s for s in shardable(value(source), self.n) if self.origin or s in wanted]
        domain = sorted({I, R, *have, *split})
        c = problem.graph.variable(len(domain), None, f"copy of {source.name}")
        problem.copies[source], problem.copy_domains[source] = c, domain
        problem.graph.add((x, c), matrix(have, domain))
        for variable, states in uses:
            key = ("t", tuple(have), tuple(domain), tuple(states), moved)
            if key not in self._tables:
                direct, shared = matrix(have, states), matrix(domain, states)
                self._tables[key] = np.minimum(direct[:, None, :], shared[None, :, :])
            problem.graph.add((x, c, variable), self._tables[key])
