"""Of a mesh with two planned axes: the plan of the first of them, and what the plan of a rank's
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

from autoshard.planning.cost import change_collectives
from autoshard.planning.decisions import Decisions, serial_name
from autoshard.planning.fusion import Kernels
from autoshard.planning.prices import AxisPrices
from autoshard.planning.strategy import operands
from autoshard.planning.values import producer
from autoshard.runtime.collectives import Axis, I, R, State, redistribute, shard_dim

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
        parts = 1 if shard_dim(state) is None else n
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
