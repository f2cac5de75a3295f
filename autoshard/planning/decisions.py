"""What was decided for one graph on one mesh axis: the solver's answer, by the graph's nodes."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import fx

from autoshard.planning.chunked_loss import Losses
from autoshard.planning.cost import Machine
from autoshard.planning.plan import GraphPlan, strategy_text
from autoshard.planning.prices import AxisPrices
from autoshard.planning.strategy import Strategy
from autoshard.planning.values import output_state, producer
from autoshard.runtime.collectives import State
from autoshard.runtime.graph_meta import VALUE

ValueKey = tuple[fx.Node, State]
"""A value on a rank: the node that makes it, and its placement there."""


def value_text(key: ValueKey) -> str:
    """`mm_3 S(1)`: a value by the name of its node and its placement."""
    node, state = key
    return f"{node.name} {state}"


def serial_name(node: fx.Node) -> str:
    """The name of the planned node that a node of the graph made of it stands for, by the text that
    it was given; "" where it was given none."""
    return str(node.meta.get("custom", {}).get(VALUE, "")).partition(" ")[0]


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
    bytes on the host. transfers: seconds of their way there and back. length: the segments that
    were joined to one.
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
    length: int = 1


@dataclass(frozen=True, kw_only=True)
class Decisions:
    """The solution for one graph, in terms of its nodes.

    copies: the state of each shared copy. stored: of each parameter. outputs: of each output.
    offered: the strategies each node could choose from; declined: why others were not offered.
    seconds: of a step, as the planner charges it. variables, width, work, gap: the size of the
    solver's problem, and the seconds by which another plan may be cheaper, as far as is known (see
    `Solution`). held: nodes whose value was not chosen by cost. prices: what a
    change of state was charged. unbalanced: causal attention whose ranks do unequal work, and why.
    recomputation: what is computed again in backward; None: what the compiler likes. others: under
    a budget, further plans to try. unbudgeted: the plan without the budget, which may be this one.
    weights: what dp_shard does with each parameter (`CHOICES`), where that was chosen. on_ep: of
    each mixture of experts with a choice on ep, the seconds that either is charged there.
    charged: where this plan was made at other prices than the request's, the `seconds` of that made
    at those. losses: those that go by chunks of rows, and large ones that do not.
    """

    strategies: dict[fx.Node, Strategy]
    copies: dict[fx.Node, State]
    stored: dict[fx.Node, State]
    outputs: list[State]
    offered: dict[fx.Node, list[Strategy]]
    declined: dict[fx.Node, list[str]]
    seconds: float
    variables: int
    width: int
    work: int
    prices: AxisPrices
    held: list[fx.Node]
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
        owner, index = producer(node)
        return output_state(self.strategies[owner], index)

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

    def graph_plan(self) -> GraphPlan:
        """The decisions as text, without the nodes that had no choice."""
        nodes = {
            node.name: strategy_text(strategy)
            for node, strategy in self.strategies.items()
            if node.op == "call_function" and len(self.offered[node]) > 1
        }
        return GraphPlan(nodes, {node.name: state for node, state in self.copies.items()})
