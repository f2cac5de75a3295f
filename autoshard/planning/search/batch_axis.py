"""The charge of one weight on dp_shard: whole on each rank, gathered once, or gathered twice.

The choice is each weight's own, and depends on nothing but the weight, its state on the planned
axis, and the price of a byte: so the planner charges a stored state the least of the three, and the
plan of all stays exact, over every choice, with no variable more. The collectives are priced by
`DataAxes`.

On ep, and on a cp beside tp or pp, weights are stored by rows besides, and gathered as often as on
dp_shard; a stack of experts that stays on ep has its choice of dp_shard for the part of a rank of
ep. Beside pp a weight is gathered before the first micro-batch and kept to the last one, so that
whole and once are all there is; where no dp_shard is, once and twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from autoshard.planning.estimate import DataAxes, Sent, Training, Weight, data_collectives
from autoshard.planning.mixtures import is_mixture
from autoshard.planning.operators import ADDED_PRODUCTS, LOOKUPS, PRODUCTS, is_view, packet
from autoshard.planning.strategy import operands, value
from autoshard.planning.values import differentiable
from autoshard.runtime.collectives import ONCE, TWICE, WHOLE, State

aten = torch.ops.aten


@dataclass(frozen=True, kw_only=True)
class BatchAxis:
    """dp_shard beside a planned axis.

    axes: dp_shard among the data-parallel ones. bandwidth: of memory, that the optimizer's pass
    takes. given: choices that are made already. training: what trains them, and in how many runs of
    the graph a step is made. experts: of each stack that may stay on ep.
    """

    axes: DataAxes
    bandwidth: float
    given: Mapping[fx.Node, str] = field(default_factory=dict)
    training: Training = field(default_factory=Training)
    experts: Mapping[fx.Node, int] = field(default_factory=dict)

    def charges(
        self, node: fx.Node, state: State, price: float, travels: bool = False
    ) -> dict[str, float]:
        """Seconds of a run of the graph that each choice for a parameter, in a state on the planned
        axis, is charged. price: of a byte that a rank holds. travels: whether a stack of experts
        that may stay on ep is gathered there."""
        axes, training, found = self.axes, self.training, {}
        experts = 0 if travels else self.experts.get(node, 0)
        one = axes.weight(node, state, _is_read_in_backward(node), experts)
        for choice in self._possible(node, one):
            weight = replace(one, choice=choice)
            own = weight.holds(weight.stored_part(axes.layout), training)
            held = sum(own) + self._beside(weight)
            sent = sum(
                axes.took(each) * self._runs(each)
                for each in data_collectives([weight], axes.layout, training)
            )
            passes = own.updated / self.bandwidth / training.microbatches
            found[choice] = held * price + axes.second * sent + passes
        return found

    def least(self, node: fx.Node, state: State, price: float, travels: bool = False) -> float:
        """Seconds that the cheapest choice is charged."""
        return min(self.charges(node, state, price, travels).values())

    def choice(self, node: fx.Node, state: State, price: float, travels: bool = False) -> str:
        """The cheapest choice; of equals the one that takes least memory."""
        found = self.charges(node, state, price, travels)
        return min(found, key=lambda choice: found[choice])

    def _possible(self, node: fx.Node, weight: Weight) -> tuple[str, ...]:
        if node in self.given:
            return (self.given[node],)
        if not weight.shape or not weight.gathered(self.axes.layout):
            return (WHOLE,)
        split = (ONCE,) if self.axes.layout.staged else (TWICE, ONCE)
        return (*split, WHOLE) if self.axes.layout.shard > self.axes.layout.inner else split

    def _beside(self, weight: Weight) -> int:
        """Bytes of a weight that a rank holds from its forward to its backward beside what it
        stores: the gathered one. Beside pp it is there whoever reads it, and its whole gradient."""
        gathered = weight.gathered(self.axes.layout)
        if not self.axes.layout.staged:
            kept = weight.again and not weight.gathered_twice(self.axes.layout)
            return gathered * weight.itemsize if kept else 0
        summed = max(weight.kept, weight.reduced or 0) if weight.trained else 0
        return gathered * (weight.itemsize + summed)

    def _runs(self, sent: Sent) -> float:
        """How often a collective runs for one run of the graph."""
        waits = self.axes.layout.deferred and sent.op != "all_gather"
        return 1 / self.training.microbatches if waits or self.axes.layout.staged else 1.0


def _is_read_in_backward(node: fx.Node) -> bool:
    """Whether a derivative may read a parameter: none reads what is only looked up in, or added."""
    return any(_reads(user, node) for user in node.users)


def _reads(user: fx.Node, source: fx.Node) -> bool:
    operator = packet(user)
    if user.op == "output" or operator in (aten.add, aten.sub):
        return False
    if operator in LOOKUPS:
        return user.args[0] is not source
    if is_view(user) or operator is aten._to_copy:
        return _is_read_in_backward(user)
    if is_mixture(user) and source in user.args[3]:  # type: ignore[operator]
        return value(source).dim() > 2  # biases are added
    if operator in PRODUCTS:
        added = operator in ADDED_PRODUCTS
        two = operands(user)[1:3] if added else operands(user)[:2]
        return source in two and any(differentiable(one) for one in two if one is not source)
    return True
