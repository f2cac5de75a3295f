"""Roofline seconds of an operator's forward on the shapes of one rank."""

import math
from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import fx

from autoshard.planning import cost
from autoshard.planning.chunked_loss import Losses, chunks_of
from autoshard.planning.cost import Cluster, OperatorWork, tensor_bytes
from autoshard.planning.estimate.weights import Training
from autoshard.planning.fusion import Kernels
from autoshard.planning.mixtures import inner_bytes, is_mixture
from autoshard.planning.operators import (
    ADDED_PRODUCTS,
    CONVOLUTIONS,
    LOOKUPS,
    PRODUCTS,
    packet,
)
from autoshard.planning.strategy import Strategy, operands, parts_of, results, value
from autoshard.planning.values import differentiable, producer
from autoshard.runtime.collectives import shard_dim
from autoshard.runtime.operators import FLOAT8_LINEAR

_PASSES = 8
"""Of a chunk's scores through memory (runtime/operators/chunked_loss.py): the maximum and the sum
read them; the difference, the exponential and the scale read and write them."""


class OperatorTimes:
    """The operators of a graph on one rank of an axis of `n`, at the rates the cluster gets. parts:
    of how many parts of a parameter a rank uses one, where it is not the whole. kernels: of the
    graph, where they are known."""

    def __init__(
        self,
        gm: fx.GraphModule,
        n: int,
        cluster: Cluster,
        training: Training,
        parts: Mapping[fx.Node, int] = MappingProxyType({}),
        losses: Losses | None = None,
        kernels: Kernels | None = None,
    ) -> None:
        self.n, self.cluster, self.parts = n, cluster, parts
        self.chunked, self.imbalance = chunks_of(losses or {}), training.imbalance
        self.kernels = kernels or Kernels(gm, training.compiled)
        self.float8 = set(gm.graph.find_nodes(op="call_function", target=FLOAT8_LINEAR))
        if training.float8 and not self.float8:
            self.float8 = {*self._products(gm)[:-1], *filter(is_mixture, gm.graph.nodes)}

    def seconds(self, node: fx.Node, strategy: Strategy) -> float:
        """Roofline seconds of the forward on a rank's shapes; of a loss by chunks, all of it."""
        if node in self.chunked.gradients:
            return self._by_chunks(node)
        if node in self.chunked.inside and node is not self.chunked.inside[node].chain[-1]:
            return 0.0  # a part of the loss
        states = (*strategy.inputs, *strategy.outputs)
        sharded = any(shard_dim(state) is not None for state in states)
        made = zip(results(node), strategy.outputs)
        written = sum(tensor_bytes(one) / parts_of(state, self.n) for one, state in made)
        moved = written if self.kernels.writes(node) else 0.0
        most = self.imbalance if is_mixture(node) else 1.0
        moved += 2 * most * inner_bytes(node, strategy, self.n)
        seen: set[fx.Node] = set()
        for tensor, want in zip(operands(node), strategy.inputs):
            base = self.kernels.base[tensor]
            if base in seen or self.kernels.joins(base, node):
                continue
            seen.add(base)
            size = tensor_bytes(value(tensor)) / parts_of(want, self.n) / self.parts.get(base, 1)
            moved += min(size, written) if packet(node) in LOOKUPS else size
        flops = most * cost.node_flops(node) * (strategy.share / self.n if sharded else 1.0)
        dtype = dtype_of(node)
        if node in self.float8:
            dtype = torch.float8_e4m3fn
            moved += self._cast(node, strategy)
        narrowest = self._narrowest(node, strategy) if flops else math.inf  # an empty one has none
        work = OperatorWork(flops, moved, dtype, narrowest, cost.is_attention(node))
        return self.cluster.seconds(work) + strategy.waits * cost.WAIT_SECONDS

    def scaling(self, node: fx.Node) -> float:
        """Seconds of the backward of a loss by chunks: its gradients times a number."""
        one = self.chunked.gradients.get(node)
        if one is None:
            return 0.0
        return self.cluster.seconds(OperatorWork(0, one.kept + one.scaled, torch.float32))

    def _by_chunks(self, loss: fx.Node) -> float:
        """Seconds of a loss by chunks beside its product: the products that make the gradients, and
        operators on scores that nothing joins."""
        one = self.chunked.gradients[loss]
        head = next(plan for plan in self.chunked.inside.values() if plan.chain[0] in loss.args)
        product = head.chain[-1]
        trained = sum(map(differentiable, head.operands[:2])) if one.kept else 0
        whole = cost.node_flops(product) * one.logits / tensor_bytes(value(product))
        narrow = value(product).dtype.itemsize
        wide = max(4, value(head.chain[0]).dtype.itemsize)
        passes = _PASSES * wide + 2 * len(head.functions) * (narrow + wide)
        products = OperatorWork(trained * whole, 0, dtype_of(product))
        others = OperatorWork(0, one.logits / narrow * passes, products.dtype)
        return self.cluster.seconds(products) + self.cluster.seconds(others)

    def _narrowest(self, node: fx.Node, strategy: Strategy) -> float:
        """The smallest of the three extents of a matrix product on a rank."""
        kind, made = packet(node), value(node)
        if is_mixture(node):
            return self._narrowest_of_experts(node, strategy)
        if kind not in PRODUCTS - CONVOLUTIONS or not isinstance(strategy.output, str):
            return math.inf
        first = kind in ADDED_PRODUCTS
        left, have = value(operands(node)[first]), strategy.inputs[first]
        if made.dim() < 2 or left.dim() < 2:
            return math.inf
        columns, inner = float(cost.hint(made.shape[-1])), float(cost.hint(left.shape[-1]))
        rows = cost.numel(made) / columns
        if shard_dim(strategy.output) == made.dim() - 1:
            columns /= self.n
        elif shard_dim(have) == left.dim() - 1:
            inner /= self.n
        elif shard_dim(strategy.output) is not None:
            rows /= self.n
        return max(1.0, min(rows, columns, inner))

    def _narrowest_of_experts(self, node: fx.Node, strategy: Strategy) -> float:
        """The same of the products of one expert, whose rows come from all ranks that have others
        of its stack; on a rank of the planned axis."""
        ids, stacks = operands(node)[1], operands(node)[3:]
        experts = cost.hint(value(stacks[0]).shape[0])
        rows = cost.numel(value(ids)) * self.parts.get(self.kernels.base[stacks[0]], 1) / experts
        sizes = [
            cost.hint(size) / (self.n if dim == shard_dim(state) else 1)
            for stack, state in zip(stacks, strategy.inputs[3:])
            for dim, size in enumerate(value(stack).shape)
            if dim and value(stack).dim() == 3
        ]
        return max(1.0, min(rows, *sizes))

    def _products(self, gm: fx.GraphModule) -> list[fx.Node]:
        """The products of something with a parameter."""
        return [
            node
            for node in gm.graph.nodes
            if node.target is torch.ops.aten.linear.default
            and self.kernels.base[operands(node)[1]].op == "placeholder"
        ]

    def _cast(self, node: fx.Node, strategy: Strategy) -> float:
        """Bytes that move while the activation is scaled to float8: read, and written as one."""
        tensor, want = operands(node)[0], strategy.inputs[0]
        elements = cost.numel(value(tensor)) / parts_of(want, self.n)
        return elements * (value(tensor).element_size() + 1)


def dtype_of(node: fx.Node) -> torch.dtype:
    """What the operator computes in: the dtype of its first operand, or of its result."""
    for tensor in operands(node):
        if value(tensor).is_floating_point():
            dtype: torch.dtype = value(tensor).dtype
            return dtype
    made = value(producer(node)[0])
    first = made[0] if isinstance(made, (tuple, list)) and made else made
    return first.dtype if isinstance(first, torch.Tensor) else torch.float32
