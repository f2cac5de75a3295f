"""A rank's parts of a model's weights, read from one process or from a running sharded job."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from autoshard.export.rank_graph.graph import RankGraph, RankWeight
from autoshard.export.rank_graph.quantized import quantized_part
from autoshard.export.weight_source import WeightSource
from autoshard.runtime.collectives import Axis, chunk_bounds, shard_dim


@dataclass(frozen=True)
class Shard:
    """What rank `axis.rank` stores of a weight."""

    weight: RankWeight
    axis: Axis

    def needs(self, shape: tuple[int, ...]) -> list[tuple[int, int]]:
        """For each dim, the first index it needs and one past the last: all, where scales are of
        more than a rank's part."""
        needed = [(0, size) for size in shape]
        dim = shard_dim(self.weight.state)
        if dim is not None and self.weight.quantized is None:
            start, length = chunk_bounds(shape[dim], self.axis)
            needed[dim] = (start, start + length)
        return needed

    def take(self, tensor: torch.Tensor, starts: tuple[int, ...]) -> torch.Tensor:
        """The shard, contiguous on the CPU in the weight's dtype, of a tensor that begins at
        index `starts` of the whole."""
        for dim, (first, last) in enumerate(self.needs(self.weight.shape)):
            tensor = tensor.narrow(dim, first - starts[dim], last - first)
        return tensor.to("cpu", self.weight.dtype).contiguous()


def read_weights(source: WeightSource, graph: RankGraph, first: int = 0) -> dict[str, torch.Tensor]:
    """The weights of the rank that this process builds, by placeholder: `first` + its own rank.

    graph: of any rank. Empty where the mesh has no such rank. Collective where the model stores
    shards: one parameter at a time, and a parameter is gathered only where what some process holds
    is not what it needs, or where it is quantized. A quantized one is its numbers, its scales by
    the placeholder of these.
    """
    ranks = range(first, min(first + source.job.size, graph.tp))
    mine = source.job.rank
    parts: dict[str, torch.Tensor] = {}
    for target, weight in sorted(graph.weights.items(), key=lambda item: item[1].name):
        shards = [Shard(weight, graph.axis._replace(rank=rank)) for rank in ranks]
        block = source.read(weight.name, [[shard] for shard in shards])
        if mine >= len(shards):
            continue
        part = shards[mine].take(block.tensor, block.starts)
        if weight.quantized is None:
            parts[target] = part
        else:
            held = quantized_part(weight, shards[mine].axis, part)
            parts[target], parts[weight.quantized.scale] = held.values, held.scale
    return parts
