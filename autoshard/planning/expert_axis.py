"""The axis ep beside a planned axis: what may travel over it for a mixture of experts, and prices.

Rows travel to their experts, or the stacks of experts are gathered like any other parameter. Each
strategy of a mixture is offered with both, so that the plan is the cheapest of all placements with
all choices, and no variable more. How stacks are stored is the same either way. Prices are those of
the estimate; of a gather, as on dp_shard, of this stack alone (`DataAxes`). What ep adds to the way
of a stack to its mixture depends on both: on how the stack is stored, and on how the mixture runs
and what travels.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import fx

from autoshard.planning import cost
from autoshard.planning.cost import collective_seconds
from autoshard.planning.decisions import Origin
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
from autoshard.planning.prices import AxisPrices
from autoshard.planning.sizes import why_not
from autoshard.planning.strategy import Strategy, operands, value
from autoshard.planning.values import differentiable, output_state
from autoshard.runtime.collectives import S, State
from autoshard.runtime.graph_meta import DIFF, REDUCED_DTYPE

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
        if not (alike and stored) or why_not(exchangeable(of), self.size) is not None:
            return ()
        both = (ROWS, WEIGHTS)
        return both if self.exchange == "auto" or node.name in self.named else (self.exchange,)

    def rows(self, node: fx.Node, strategy: Strategy) -> float:
        """Seconds that rows of a mixture travel, and the host waits for their counts."""
        if strategy.on_ep != ROWS:
            return 0.0
        back, link = differentiable(node), self.axes.links["ep"]
        return cost.WAIT_SECONDS + sum(
            collective_seconds(one.op, one.nbytes, self.size, link, copies=one.copies)
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


class StackTables:
    """The tables of stacks and their mixtures, equal ones made once."""

    def __init__(self, axis: ExpertAxis, prices: AxisPrices) -> None:
        self.axis, self.prices = axis, prices
        self._made: dict[tuple[Any, ...], np.ndarray] = {}

    def of_mixture(
        self, node: fx.Node, domains: Mapping[fx.Node, list[Strategy]]
    ) -> Iterator[tuple[fx.Node, np.ndarray]]:
        """Each stack of a mixture, with what ep adds."""
        for position, stack in enumerate(operands(node)[STACKS:], STACKS):
            have = [output_state(one, None) for one in domains[stack]]
            yield stack, self.added(node, position, have, domains[node])

    def added(
        self, reader: fx.Node, position: int, have: Sequence[State], domain: Sequence[Strategy]
    ) -> np.ndarray:
        """Seconds that ep adds to the prices of operand `position` of a mixture: [state in which it
        is stored, strategy]. Where rows travel, a change of state is of a rank's part."""
        stack = operands(reader)[position]
        moved, kind = self.prices.moved(stack), tuple(value(stack).shape)
        trained = (stack.meta.get(DIFF), stack.meta.get(REDUCED_DTYPE), differentiable(reader))
        key = (tuple(have), tuple(domain), position, moved, kind, *trained)
        if key not in self._made:
            made = [self._row(reader, stack, position, state, domain) for state in have]
            self._made[key] = np.array(made)
        return self._made[key]

    def _row(
        self,
        reader: fx.Node,
        stack: fx.Node,
        position: int,
        state: State,
        domain: Sequence[Strategy],
    ) -> list[float]:
        axis, prices, whole = self.axis, self.prices, self.prices.moved(stack)
        part = whole._replace(nbytes=whole.nbytes // axis.size)
        byte = prices.stored_byte(stack)
        if prices.batch is None:
            gathered = axis.gathered(stack, reader, state, byte)
        else:  # which charges a stored stack as one that stays
            both = (prices.batch.charges(stack, state, byte, travels) for travels in (True, False))
            travels, stays = (min(one.values()) for one in both)
            gathered = travels - stays
        experts, found = cost.hint(value(stack).shape[0]), []
        for one in domain:
            want, added = one.inputs[position], 0.0
            if one.on_ep == WEIGHTS:
                added = gathered
            elif one.on_ep == ROWS and not axis.stays(experts, state, want):
                added = np.inf
            elif one.on_ep == ROWS and (seconds := prices.change(state, want, whole)) < np.inf:
                added = prices.change(state, want, part) - seconds
            found.append(added)
        return found
