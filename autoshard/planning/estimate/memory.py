"""The bytes a rank holds in a training step, from the plan: the one account of memory of a plan.

`memory_budget`, `autoshard plan` and the alternatives of `explain` ask it. `Program.memory` is the
exact account, of the graphs that run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import fx

from autoshard.planning.decisions import Decisions, Recomputation
from autoshard.planning.estimate.activations import SavedForBackward, Saving
from autoshard.planning.estimate.training import Training
from autoshard.planning.estimate.weights import Layout, Weight, buckets, sent_bytes, weights_of
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
    activations = Saving(gm, decisions, n, compiled).run()
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
    each = [weight.holds(weight.stored_part(layout), training) for weight in held.weights]
    gradients = sum(one.gradient for one in each)
    if layout.deferred and layout.shard > 1 and training.microbatches > 1:
        gradients = sent_bytes(held.weights, lambda weight: weight.numel, training)
    return Footprint(
        parameters=sum(one.stored for one in each),
        gradients=gradients,
        optimizer=sum(one.states for one in each),
        activations=held.activations.saved + held.activations.transient,
        buckets=_bucket_bytes(held, layout, training),
        buffers=held.buffers,
    )


def _bucket_bytes(held: RankHolds, layout: Layout, training: Training) -> int:
    if layout.shard * layout.replicate == 1:
        return 0
    gathered, kept, reduced = [], 0, []
    for bucket in buckets(held.weights, layout):
        twice = [w for w in bucket if w.gathered_twice(layout)]
        gathered.append(sum(w.gathered(layout) * w.itemsize for w in twice))
        kept += sum(w.gathered(layout) * w.itemsize for w in bucket if w not in twice)
        reduced.append(sent_bytes(bucket, lambda weight: weight.whole(layout), training))
    # a gradient bucket is there twice: its members, and the joined one that is sent
    sending = 2 * max(reduced, default=0)
    if layout.shard == 1:
        return sending
    return kept + max((a + b for a, b in zip(gathered, [*gathered[1:], 0])), default=0) + sending
