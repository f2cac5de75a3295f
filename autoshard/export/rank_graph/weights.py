"""A rank's parts of a model's weights, read from one process or from a running sharded job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from autoshard.export.rank_graph.graph import Weight
from autoshard.export.weights import Memory
from autoshard.runtime.collectives import Axis, chunk_bounds, shard_dim


@dataclass(frozen=True)
class Cut:
    """What rank `axis.rank` stores of a weight."""

    weight: Weight
    axis: Axis

    def needs(self, shape: tuple[int, ...]) -> list[tuple[int, int]]:
        """For each dim, the first index it needs and one past the last."""
        needed = [(0, size) for size in shape]
        dim = shard_dim(self.weight.state)
        if dim is not None:
            start, length = chunk_bounds(shape[dim], self.axis)
            needed[dim] = (start, start + length)
        return needed

    def take(self, tensor: torch.Tensor, starts: tuple[int, ...]) -> torch.Tensor:
        """The part, contiguous on the CPU in the weight's dtype, of a tensor that begins at
        index `starts` of the whole."""
        for dim, (first, last) in enumerate(self.needs(self.weight.shape)):
            tensor = tensor.narrow(dim, first - starts[dim], last - first)
        return tensor.to("cpu", self.weight.dtype).contiguous()


def rank_weights(
    memory: Memory, wanted: Sequence[Mapping[str, Weight] | None], axes: Sequence[Axis | None]
) -> dict[str, torch.Tensor]:
    """This process's parts, by placeholder.

    wanted, axes: for each process of the job, the weights it builds with and the rank it builds,
    None where it builds nothing; one entry where one process exports alone. Collective where the
    model stores shards: one parameter at a time, and a parameter is gathered only where what some
    process holds is not what it needs.
    """
    names = sorted({w.name for weights in wanted if weights for w in weights.values()})
    by_name = [{w.name: w for w in weights.values()} if weights else {} for weights in wanted]
    mine = wanted[memory.rank] or {}
    targets = {weight.name: target for target, weight in mine.items()}
    parts: dict[str, torch.Tensor] = {}
    for name in names:
        cuts = [
            [Cut(found[name], axis)] if axis is not None and name in found else []
            for found, axis in zip(by_name, axes, strict=True)
        ]
        part = memory.read(name, cuts)
        if name in targets:
            (cut,) = cuts[memory.rank]
            parts[targets[name]] = cut.take(part.tensor, part.starts)
    return parts
