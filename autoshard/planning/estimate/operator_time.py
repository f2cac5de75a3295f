"""Roofline seconds of an operator's forward on the shapes of one rank."""

from __future__ import annotations

import torch
from torch import fx

from autoshard.planning import cost
from autoshard.planning.cost import Cluster
from autoshard.planning.fusion import Kernels, joined
from autoshard.planning.mixtures import inner_bytes
from autoshard.planning.strategy import Strategy, operands, value
from autoshard.planning.values import is_lookup, producer, tensor_bytes
from autoshard.runtime.collectives import State, shard_dim


class OperatorTimes:
    """The operators of a graph on one rank of an axis of `n`, at the rates the cluster gets."""

    def __init__(self, gm: fx.GraphModule, n: int, cluster: Cluster) -> None:
        self.n, self.cluster = n, cluster
        self.kernels = Kernels(gm)

    def seconds(self, node: fx.Node, strategy: Strategy) -> float:
        """Roofline seconds of the forward on a rank's shapes."""
        states = [strategy.output] if isinstance(strategy.output, str) else list(strategy.output)
        sharded = any(shard_dim(state) is not None for state in (*strategy.inputs, *states))
        made = value(node)
        results = made if isinstance(made, (tuple, list)) else [made]
        written = sum(tensor_bytes(one) / self._split(state) for one, state in zip(results, states))
        moved = written if self.kernels.writes(node) else 0.0
        moved += 2 * inner_bytes(node, strategy, self.n)
        seen: set[fx.Node] = set()
        for tensor, want in zip(operands(node), strategy.inputs):
            base = self.kernels.base[tensor]
            if base in seen or joined(base, node, self.kernels.stage):
                continue
            seen.add(base)
            size = tensor_bytes(value(tensor)) / self._split(want)
            moved += min(size, written) if is_lookup(node) else size
        share = self.cluster.efficiency
        own = strategy.share / self.n if sharded else 1.0
        flops = cost.node_flops(node) * own / share.compute
        busy = cost.node_seconds(flops, moved / share.memory, dtype_of(node), self.cluster.device)
        return busy + strategy.waits * cost.WAIT_SECONDS

    def _split(self, state: State) -> int:
        return 1 if shard_dim(state) is None else self.n


def dtype_of(node: fx.Node) -> torch.dtype:
    """What the operator computes in: the dtype of its first operand, or of its result."""
    for tensor in operands(node):
        if value(tensor).is_floating_point():
            dtype: torch.dtype = value(tensor).dtype
            return dtype
    made = value(producer(node)[0])
    first = made[0] if isinstance(made, (tuple, list)) and made else made
    return first.dtype if isinstance(first, torch.Tensor) else torch.float32
