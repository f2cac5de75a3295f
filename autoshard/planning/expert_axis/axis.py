"""The axis ep beside a planned axis: what may travel over it for a mixture of experts, and prices.

Rows travel to their experts, or the stacks of experts are gathered like any other parameter. Each
strategy of a mixture is offered with both, so that the plan is the cheapest of all placements with
all choices, and no variable more. How stacks are stored is the same either way. Prices are those of
the estimate; of a gather, as on dp_shard, of this stack alone (estimate/weight_alone.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from torch import fx

from autoshard.planning import cost
from autoshard.planning.cost import collective_seconds
from autoshard.planning.estimate import DataAxes, Training, data_collectives
from autoshard.planning.mixtures import (
    ROWS,
    WAYS,
    WEIGHTS,
    exchangeable,
    exchanged_beside,
    is_mixture,
    way_of,
)
from autoshard.planning.outer import Origin
from autoshard.planning.strategy import Strategy, operands, value
from autoshard.planning.values import differentiable, leaves_none_empty
from autoshard.runtime.collectives import S, State

STACKS = 3
"""The position of a mixture's first stack among its operands."""


@dataclass(frozen=True, kw_only=True)
class ExpertAxis:
    """ep beside a planned axis.

    axes: ep among the data-parallel ones. parameters: their placeholders. exchange: what may
    travel, of the option `ep_exchange`. named: mixtures of which a plan file says it.
    """

    axes: DataAxes
    parameters: Collection[fx.Node]
    exchange: str = "auto"
    named: frozenset[str] = field(default_factory=frozenset)

    @property
    def size(self) -> int:
        """Ranks of ep."""
        return self.axes.layout.experts

    def ways(self, node: fx.Node, origin: Origin | None = None) -> tuple[str, ...]:
        """What may travel for a mixture; nothing of any other node, and where weights must. origin:
        of the graph of a rank, where the node is a part of that, made alone."""
        if not is_mixture(node):
            return ()
        of = origin.nodes.get(node, node) if origin is not None else node
        stacks, own = operands(of)[STACKS:], operands(node)[STACKS:]
        alike = [value(one).shape for one in stacks] == [value(one).shape for one in own]
        stored = all(one in self.parameters for one in stacks)
        if not (alike and stored and leaves_none_empty(exchangeable(of), self.size)):
            return ()
        both = (ROWS, WEIGHTS)
        return both if self.exchange == "auto" or node.name in self.named else (self.exchange,)

    def rows(self, node: fx.Node, strategy: Strategy) -> float:
        """Seconds that rows of a mixture travel, and the host waits for their counts."""
        if strategy.on_ep != ROWS:
            return 0.0
        back = differentiable(node)
        return cost.WAIT_SECONDS + sum(
            collective_seconds(one.op, one.nbytes, self.size, self.axes.links["ep"])
            for one in exchanged_beside(node, strategy, self.axes.n, self.size)
            if back or not one.backward
        )

    def read(self, strategy: Strategy, position: int) -> int:
        """Of how many parts of operand `position` of a mixture a rank reads one, because of ep."""
        return self.size if strategy.on_ep == ROWS and position >= STACKS else 1

    def each_way(
        self, node: fx.Node, found: Iterable[Strategy], ways: tuple[str, ...]
    ) -> list[Strategy]:
        """Strategies of a mixture with what travels over ep; weights where rows cannot."""
        experts, made = cost.hint(value(operands(node)[-1]).shape[0]), []
        for one in found:
            whole = way_of(one) in (WAYS[0], WAYS[3])
            fits = self._divides(experts, self.axes.n if whole else 1)
            made += [one._replace(on_ep=way) for way in ways if fits or way == WEIGHTS]
            if not fits and WEIGHTS not in ways:
                made.append(one._replace(on_ep=WEIGHTS))
        return made

    def stays(self, experts: int, stored: State, want: State) -> bool:
        """Whether a rank of ep has whole experts of a stack that the planned axis changes so."""
        if stored == want:
            return True
        if want == S(0):  # experts numbered by ep first
            return False
        return stored != S(0) or self._divides(experts, self.axes.n)

    def _divides(self, experts: int, parts: int) -> bool:
        """Whether ep divides what `parts` ranks of the planned axis have, and those of a cp."""
        before = parts * self.axes.layout.outer
        return before == 1 or experts % (before * self.size) == 0

    def gathered(self, stack: fx.Node, reader: fx.Node, state: State, price: float) -> float:
        """Seconds that the gathers of a stack over ep, and the reduction of its gradient, are
        charged. state: on the planned axis. price: of a byte that a rank holds."""
        axes, layout, held = self.axes, self.axes.layout, 0.0
        again = differentiable(reader) and value(stack).dim() > 2  # biases are only added
        one = axes.weight(stack, state, again)
        if again and not one.gathered_twice(layout):
            held = one.numel * one.itemsize * (1 - 1 / self.size)
        sent = [s for s in data_collectives([one], layout, Training()) if s.axis == "ep"]
        return held * price + axes.second * sum(map(axes.took, sent))
