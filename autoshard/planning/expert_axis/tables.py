"""What ep adds to the way of a stack of experts to its mixture, which depends on both: on how the
stack is stored, and on how the mixture runs and what travels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch import fx

from autoshard.planning import cost
from autoshard.planning.expert_axis.axis import STACKS, ExpertAxis
from autoshard.planning.mixtures import ROWS, WEIGHTS
from autoshard.planning.prices import AxisPrices
from autoshard.planning.strategy import Strategy, operands, value
from autoshard.planning.values import differentiable, output_state
from autoshard.runtime.collectives import State
from autoshard.runtime.graph_meta import DIFF, REDUCED_DTYPE


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
            least = prices.batch.least
            gathered = least(stack, state, byte, True) - least(stack, state, byte)
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
