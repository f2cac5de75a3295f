"""The bytes a rank holds in a training step, from the plan: the one account of memory of a plan.

`memory_budget`, `autoshard plan` and the alternatives of `explain` ask it. `Program.memory` is the
exact account, of the graphs that run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import fx

from autoshard.planning.decisions import Decisions, Recomputation
from autoshard.planning.estimate.activations import SavedForBackward, saved_for_backward
from autoshard.planning.estimate.training import Training
from autoshard.planning.estimate.weights import Layout, Weight, buckets, weights_of
from autoshard.planning.strategy import value
from autoshard.planning.values import tensor_bytes
from autoshard.runtime.graph_meta import BUFFER


@dataclass(frozen=True, kw_only=True)
class RankHolds:
    """What a rank of a tp axis holds, whatever the data-parallel axes. buffers: their bytes."""

    weights: tuple[Weight, ...]
    activations: SavedForBackward
    buffers: int


def held(
    gm: fx.GraphModule,
    decisions: Decisions,
    parameters: Mapping[fx.Node, str],
    n: int,
    compiled: bool = True,
) -> RankHolds:
    """What a rank of an axis of `n` holds of `gm` under `decisions`. compiled: as in Training."""
    activations = saved_for_backward(gm, decisions, n, compiled)
    if decisions.recomputation is not None:
        activations = recomputed(activations, decisions.recomputation)
    return RankHolds(
        weights=weights_of(gm, decisions, parameters, n, activations.weights),
        activations=activations,
        buffers=sum(tensor_bytes(value(node)) for node in gm.graph.nodes if node.meta.get(BUFFER)),
    )


def recomputed(free: SavedForBackward, chosen: Recomputation) -> SavedForBackward:
    """What a rank keeps under a choice of what is computed again; `free`: without one."""
    transient = free.transient + chosen.peak - chosen.kept
    return replace(free, saved=chosen.kept, transient=transient)


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Bytes one rank holds at the worst moment of a step, by kind.

    gradients: whole ones until the last microbatch where its layout says so. activations: saved
    for the backward, and the largest gradient that passes. buckets: parameters
    gathered and gradients waiting for their reduction. buffers: the model's own.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    buckets: int
    buffers: int

    @property
    def total(self) -> int:
        """The sum of all kinds."""
        kinds = (self.parameters, self.gradients, self.optimizer, self.activations)
        return sum(kinds) + self.buckets + self.buffers


def footprint(held: RankHolds, layout: Layout, training: Training) -> Footprint:
    """The memory of a rank. Exact for parameters, gradients, optimizer and buffers; activations
    (planning/estimate/activations.py) and buckets, two of them at work at once, are models."""
    parameters = gradients = optimizer = 0
    whole = layout.deferred and layout.shard > 1 and training.microbatches > 1
    for weight in held.weights:
        part = weight.stored_part(layout)
        parameters += part * training.stored(weight.kept)
        if weight.trained and whole:
            gradients += weight.part(1) * training.sent(weight.itemsize, weight.reduced)
        elif weight.trained:
            gradients += part * training.gradient(weight.kept)
        if weight.trained:
            optimizer += part * training.state(weight.kept)
    return Footprint(
        parameters=parameters,
        gradients=gradients,
        optimizer=optimizer,
        activations=held.activations.saved + held.activations.transient,
        buckets=_bucket_bytes(held, layout, training),
        buffers=held.buffers,
    )


def _bucket_bytes(held: RankHolds, layout: Layout, training: Training) -> int:
    if layout.shard * layout.replicate == 1:
        return 0
    gathered, kept, reduced = [], 0, []
    for bucket in buckets(held.weights, layout):
        ep = layout.experts
        whole = {w.name: w.numel // (ep if w.stays(ep) else 1) for w in bucket}
        twice = [w for w in bucket if w.gathered_twice(layout)]
        gathered.append(sum(w.gathered(layout) * w.itemsize for w in twice))
        kept += sum(w.gathered(layout) * w.itemsize for w in bucket if w not in twice)
        sizes = ((whole[w.name], w) for w in bucket if w.trained)
        reduced.append(sum(size * training.sent(w.itemsize, w.reduced) for size, w in sizes))
    # a gradient bucket is there twice: its members, and the joined one that is sent
    sending = 2 * max(reduced, default=0)
    if layout.shard == 1:
        return sending
    return kept + max((a + b for a, b in zip(gathered, [*gathered[1:], 0])), default=0) + sending
