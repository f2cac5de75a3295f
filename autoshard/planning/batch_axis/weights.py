"""The charge of one weight on dp_shard: whole on each rank, gathered once, or gathered twice.

The choice is each weight's own, and depends on nothing but the weight, its state on the planned
axis, and the price of a byte: so the planner charges a stored state the least of the three, and the
plan of all stays exact, over every choice, with no variable more. The collectives are those of
estimate/traffic.py for a bucket of this weight alone, but that a bucket's latency is shared by its
members by their bytes.

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

from autoshard.planning import cost
from autoshard.planning.asked import Request
from autoshard.planning.cost import (
    HARDWARE,
    Hardware,
    Link,
    collective_seconds,
    default_bucket_bytes,
    planned_on,
    reference_bytes,
)
from autoshard.planning.estimate import (
    Layout,
    Sent,
    Training,
    Weight,
    data_collectives,
    experts_of,
    seconds,
)
from autoshard.planning.mixtures import is_mixture
from autoshard.planning.operators import ADDED_PRODUCTS, LOOKUPS, PRODUCTS, is_view, packet
from autoshard.planning.strategy import operands, value
from autoshard.planning.values import differentiable, global_bytes
from autoshard.runtime.collectives import ONCE, TWICE, WHOLE, State, chunk_size, shard_dim
from autoshard.runtime.graph_meta import DIFF, REDUCED_DTYPE, STORED_DTYPE

aten = torch.ops.aten


@dataclass(frozen=True, kw_only=True)
class BatchAxis:
    """dp_shard beside a planned axis of `n` ranks.

    ranks, links: of the data-parallel axes, by name. second: seconds of a step that a second of
    their collectives is charged; less than one where compute hides them. bucket: bytes of one.
    bandwidth: of memory, that the optimizer's pass takes. given: choices that are made already.
    training: what trains them, and in how many runs of the graph a step is made. experts: of each
    stack that may stay on ep.
    """

    n: int
    layout: Layout
    ranks: Mapping[str, int]
    links: Mapping[str, Link]
    second: float
    bucket: int
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
        one, training, found = self._weight(node, state), self.training, {}
        one = replace(one, experts=0) if travels else one
        for choice in self._possible(node, one):
            weight = replace(one, choice=choice)
            part = weight.stored_part(self.layout)
            stored = part * training.stored(weight.kept)
            gradient, moments = 0, 0
            if weight.trained:
                gradient = part * training.gradient(weight.kept)
                moments = part * training.state(weight.kept)
            held = stored + gradient + moments + self._beside(weight)
            update = gradient + 2 * (stored + moments) if weight.trained else 0
            sent = sum(
                (seconds(each, self.ranks, self.links) - self._shared(each)) * self._runs(each)
                for each in data_collectives([weight], self.layout, training)
            )
            passes = update / self.bandwidth / training.microbatches
            found[choice] = held * price + self.second * sent + passes
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
        if not weight.shape or not weight.gathered(self.layout):
            return (WHOLE,)
        split = (ONCE,) if self.layout.staged else (TWICE, ONCE)
        return (*split, WHOLE) if self.layout.shard > self.layout.inner else split

    def _beside(self, weight: Weight) -> int:
        """Bytes of a weight that a rank holds from its forward to its backward beside what it
        stores: the gathered one. Beside pp it is there whoever reads it, and its whole gradient."""
        gathered = weight.gathered(self.layout)
        if not self.layout.staged:
            kept = weight.again and not weight.gathered_twice(self.layout)
            return gathered * weight.itemsize if kept else 0
        summed = max(weight.kept, weight.reduced or 0) if weight.trained else 0
        return gathered * (weight.itemsize + summed)

    def _runs(self, sent: Sent) -> float:
        """How often a collective runs for one run of the graph."""
        waits = self.layout.deferred and sent.op != "all_gather"
        return 1 / self.training.microbatches if waits or self.layout.staged else 1.0

    def _shared(self, sent: Sent) -> float:
        """Seconds of a bucket's latency that its other members pay."""
        latency = collective_seconds(sent.op, 0, self.ranks[sent.axis], self.links[sent.axis])
        return latency * (1 - min(1.0, sent.nbytes / self.bucket))

    def _weight(self, node: fx.Node, state: State) -> Weight:
        val, dim = value(node), shard_dim(state)
        shape = [cost.hint(extent) for extent in val.shape]
        if dim is not None:
            shape[dim] = chunk_size(shape[dim], self.n)
        stored, reduced = node.meta.get(STORED_DTYPE), node.meta.get(REDUCED_DTYPE)
        return Weight(
            name=node.name,
            shape=tuple(shape),
            itemsize=val.element_size(),
            trained=bool(node.meta.get(DIFF)),
            use=0,
            again=_is_read_in_backward(node),
            stored=None if stored is None else stored.itemsize,
            reduced=None if reduced is None else reduced.itemsize,
            experts=self.experts.get(node, 0),
        )


def batch_axis(n: int, hardware: Hardware, request: Request, second: float) -> BatchAxis | None:
    """The batch axis of a request; None where its mesh has none, or `zero` decides."""
    layout = request.layout
    if not layout.chooses:
        return None
    ranks = {"dp_shard": layout.shard // layout.inner, "dp_replicate": layout.replicate}
    ranks |= {"ep": layout.experts, "cp": layout.outer}
    sizes = {**ranks, request.axis: n}
    parameters, plan = list(request.parameters), request.plan
    items = [value(node).element_size() for node in parameters]
    limit = default_bucket_bytes(
        sum(map(global_bytes, parameters)) // n,
        max((reference_bytes(item, layout.shard) for item in items), default=0),
    )
    named = plan.weights if plan is not None else {}
    given = {node: named[name] for node, name in request.parameters.items() if name in named}
    given.update(request.chosen)
    return BatchAxis(
        n=n,
        layout=layout,
        ranks=ranks,
        links=planned_on(hardware).links(sizes) if hardware.name in HARDWARE else hardware.links,
        second=second,
        bucket=max(1, layout.bucket_bytes or limit),
        bandwidth=hardware.memory_bandwidth,
        given=given,
        training=request.training,
        experts=experts_of(parameters[0].graph) if parameters else {},
    )


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
