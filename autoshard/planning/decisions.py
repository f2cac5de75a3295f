"""What was decided for one graph on one mesh axis: the solver's answer, by the graph's nodes.

Of a mesh with two planned axes: the plan of the first of them, and what the plan of a rank's
graph takes from it, so that both axes are priced alike.

A change of state over the outer axis costs a rank of the inner one what the outer prices say of its
part of the value. What fuses, and which values are shared by several readers, is that of the serial
graph: so the cost of an operator depends on its own two strategies, and on no change elsewhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import fx

from autoshard.planning.chunked_loss import Losses
from autoshard.planning.cost import Machine, change_collectives
from autoshard.planning.fusion import Kernels
from autoshard.planning.plan import GraphPlan, strategy_text
from autoshard.planning.prices import AxisPrices
from autoshard.planning.strategy import Strategy, operands, parts_of
from autoshard.planning.values import producer, state_of
from autoshard.runtime.collectives import Axis, I, R, State, redistribute
from autoshard.runtime.graph_meta import VALUE

ValueKey = tuple[fx.Node, State]
"""A value on a rank: the node that makes it, and its placement there."""


def value_text(key: ValueKey) -> str:
    """`mm_3 S(1)`: a value by the name of its node and its placement."""
    node, state = key
    return f"{node.name} {state}"


def planned_value(node: fx.Node) -> str:
    """The `value_text` of the planned value that a node of the graph made of it stands for, which
    it was given; "" where it was given none."""
    return str(node.meta.get("custom", {}).get(VALUE, ""))


def serial_name(node: fx.Node) -> str:
    """The name of the node in `planned_value`."""
    return planned_value(node).partition(" ")[0]


@dataclass(frozen=True, kw_only=True)
class Recomputation:
    """Which values the backward computes again, or fetches from the host, instead of finding them
    kept.

    again: those it computes again, by `value_text`. saved: those that are kept. sent: those that
    are kept on the host. kept: bytes from the forward for the backward, on the device. spared:
    bytes that less is kept than with nothing computed again that takes time. peak: bytes of what is
    kept, of what is computed again and of what is fetched, at the worst moment. seconds: of a step,
    that operators and collectives take again, and that transfers outlast the compute beside them.
    bound: the least seconds that any choice in these segments takes which keeps no more. host:
    bytes on the host. transfers: seconds of their way there and back.
    """

    again: frozenset[str]
    saved: frozenset[str]
    kept: int
    spared: int
    peak: int
    seconds: float
    bound: float
    sent: frozenset[str] = frozenset()
    host: int = 0
    transfers: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Decisions:
    """The solution for one graph, in terms of its nodes.

    copies: the state of each shared copy. stored: of each parameter. outputs: of each output.
    offered: the strategies each node could choose from; declined: why others were not offered.
    seconds: of a step, as the planner charges it. variables, width, work, gap: the size of the
    solver's problem, and the seconds by which another plan may be cheaper, as far as is known (see
    `Solution`). prices: what a change of state was charged. unbalanced: causal attention whose
    ranks do unequal work, and why.
    recomputation: what is computed again in backward; None: what the compiler likes. others: under
    a budget, further plans to try. unbudgeted: the plan without the budget, which may be this one.
    weights: what dp_shard does with each parameter (`CHOICES`), where that was chosen. on_ep: of
    each mixture of experts with a choice on ep, the seconds that either is charged there.
    charged: where this plan was made at other prices than the request's, the `seconds` of that made
    at those. losses: those that go by chunks of rows, and large ones that do not.
    """

    strategies: dict[fx.Node, Strategy]
    copies: dict[fx.Node, State] = field(default_factory=dict)
    stored: dict[fx.Node, State] = field(default_factory=dict)
    outputs: list[State]
    offered: dict[fx.Node, list[Strategy]] = field(default_factory=dict)
    declined: dict[fx.Node, list[str]] = field(default_factory=dict)
    seconds: float = 0.0
    variables: int = 0
    width: int = 0
    work: int = 0
    prices: AxisPrices
    gap: float = 0.0
    unbalanced: list[str] = field(default_factory=list)
    recomputation: Recomputation | None = None
    others: tuple[Decisions, ...] = ()
    unbudgeted: Decisions | None = None
    weights: dict[fx.Node, str] = field(default_factory=dict)
    on_ep: dict[fx.Node, dict[str, float]] = field(default_factory=dict)
    charged: float | None = None
    losses: Losses = field(default_factory=dict)

    @property
    def compared(self) -> float:
        """Seconds of a step as the planner charges them at the request's prices, whatever the
        budget."""
        one = self.unbudgeted or self
        return one.seconds if one.charged is None else one.charged

    @property
    def machine(self) -> Machine:
        """The machine the graph was planned for."""
        return self.prices.machine

    def state(self, node: fx.Node) -> State:
        """The state in which `node`'s own value is produced."""
        return state_of(node, self.strategies)

    def route(self, source: fx.Node, want: State) -> tuple[State, ...]:
        """The states a consumer that wants `want` passes through: directly, or by the copy."""
        have, copy = self.state(source), self.copies.get(source)
        if copy is None or copy in (have, want):
            return (want,)
        price = self.prices.change_cost(source)
        return (copy, want) if price(copy, want) < price(have, want) else (want,)

    def gathers_again(self, source: fx.Node, have: State, want: State) -> bool:
        """Whether the gather of a weight for forward happens again in backward: the whole weight
        is not kept between the two."""
        return source in self.stored and self.prices.gathers_again(source, have, want)

    def lines(self) -> list[str]:
        """The strategy of each operator, as ranks compare them."""
        made, on = self.strategies.items(), self.prices.name
        return [f"{node.name} on {on}: {strategy_text(one)}" for node, one in made]

    def graph_plan(self) -> GraphPlan:
        """The decisions as text, without the nodes that had no choice."""
        nodes = {
            node.name: strategy_text(strategy)
            for node, strategy in self.strategies.items()
            if node.op == "call_function" and len(self.offered[node]) > 1
        }
        return GraphPlan(nodes, {node.name: state for node, state in self.copies.items()})


_ROUNDING = 1 + 1e-6
"""Two ways to add up the same costs may differ by so much."""


@dataclass(frozen=True, kw_only=True)
class Outer:
    """The plan of an axis that was laid out before the planned one, whose graph is that of a rank.

    serial: the whole graph, on no axis. decisions: its plan on `axis`. parameters: name of each
    parameter placeholder of it. bound: where both axes were planned together, the least seconds
    that any two plans of them cost; None where this axis was planned for itself.
    """

    serial: fx.GraphModule
    decisions: Decisions
    axis: Axis
    parameters: Mapping[fx.Node, str]
    bound: float | None = None
    tried: int = 1
    dearer: bool = False

    def gap(self, decisions: Decisions) -> float | None:
        """The part of the cost of both plans, with `decisions` on the inner axis, by which two
        others may be cheaper; None where that is not known."""
        if self.bound is None:
            return None
        seconds = decisions.compared
        return max(0.0, 1 - self.bound / seconds) if seconds > self.bound * _ROUNDING else 0.0

    def origin(self, local: fx.GraphModule) -> Origin:
        """What the graph of a rank, `local`, is made of."""
        by_name = {node.name: node for node in self.serial.graph.nodes}
        results: Any = self.serial.graph.output_node().args[0]
        origin = Origin(self.serial, self.decisions.prices)
        for result, state in zip(results, self.decisions.outputs):
            known = isinstance(result, fx.Node) and state != I
            origin.read_out.append(origin.prices.change_cost(result)(state, I) if known else 0.0)
        for node in local.graph.nodes:
            of = origin.nodes.get(node.args[0]) if node.target is redistribute else None
            of = of or by_name.get(serial_name(node) or node.name)
            if of is not None:
                origin.nodes[node] = of
        return origin


@dataclass
class Origin:
    """The serial graph that a rank's graph was made of, and the prices of the outer axis.

    nodes: the serial node of each node of the rank's graph; of a change of state, that of what is
    changed. read_out: seconds to make each output whole over the outer axis.
    """

    serial: fx.GraphModule
    prices: AxisPrices
    nodes: dict[fx.Node, fx.Node] = field(default_factory=dict)
    read_out: list[float] = field(default_factory=list)

    @cached_property
    def kernels(self) -> Kernels:
        """What is fused, changes of state aside."""
        return Kernels(self.serial)

    @cached_property
    def shared(self) -> frozenset[fx.Node]:
        """Values with several readers."""
        count: Counter[fx.Node] = Counter()
        for node in self.serial.graph.nodes:
            if node.op == "output":
                results: Sequence[Any] = node.args[0]  # type: ignore[assignment]
                count.update(one for one in results if isinstance(one, fx.Node))
            elif producer(node)[0] is node:
                count.update(operands(node))
        return frozenset(node for node, readers in count.items() if readers > 1)

    def is_shared(self, node: fx.Node) -> bool:
        """Whether a value of the rank's graph has several readers in the serial one. What a change
        of state makes is a copy itself, and has none."""
        return node.target is not redistribute and self.nodes.get(node) in self.shared

    def change(self, node: fx.Node, state: State, n: int) -> float:
        """Seconds of a change of state over the outer axis, where the value is in `state` on the
        inner one of `n` ranks. Without a gradient, what needs no collective is free."""
        source, (src, dst) = self.nodes[node], node.args[1:3]
        parts = parts_of(state, n)
        moved = self.prices.moved(source)
        seconds = 0.0
        if moved.diff or source in self.prices.computed or change_collectives(src, dst)[0]:  # type: ignore[arg-type]
            part = moved._replace(nbytes=moved.nbytes // parts)
            seconds = self.prices.change(src, dst, part)  # type: ignore[arg-type]
        return seconds + 1e-12 * (state == R) + 1e-13 * (parts == 1)


def on_rank(gm: fx.GraphModule, axis: Axis) -> None:
    """Give the operators of a graph that run over the axis of that name this one's rank and group,
    in place."""

    def moved(argument: Any) -> Any:
        if isinstance(argument, Axis):
            return axis if argument.name == axis.name else argument
        # a named tuple (a parameter's policy) has no axis, and must stay what it is
        return tuple(map(moved, argument)) if type(argument) is tuple else argument

    for node in gm.graph.nodes:
        node.args = moved(node.args)
        node.kwargs = {name: moved(one) for name, one in node.kwargs.items()}
    gm.recompile()
