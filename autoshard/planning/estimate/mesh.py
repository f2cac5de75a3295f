"""One row of `autoshard plan`: a profile on a mesh, as bytes and seconds of one rank.

The data-parallel axes are not searched node by node: what they do follows from the mesh, so it is
computed. A parameter is gathered over `dp_shard` before its use (and again in backward with ZeRO-3)
and its gradient is reduce-scattered there, then all-reduced over `dp_replicate`; buckets fill in
the order of use by the rule of the passes (planning/cost/bucket_size.py), and overlap as overlap.py
says. The volumes are those of Megatron-Core's and ZeRO's ledgers (S. Rajbhandari et al., "ZeRO:
memory optimizations toward training trillion parameter models", 2020, section 7).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from autoshard.planning import cost
from autoshard.planning.cost import (
    Cluster,
    Link,
    default_bucket_bytes,
    fill_buckets,
    reference_bytes,
)
from autoshard.planning.estimate.overlap import Segment, step_seconds
from autoshard.planning.estimate.step_profile import Profile, Weight
from autoshard.planning.estimate.training import Training


@dataclass(frozen=True)
class Layout:
    """The data-parallel half of a mesh and its options; `zero` and `bucket_bytes` as in Config."""

    shard: int = 1
    replicate: int = 1
    zero: int = 3
    bucket_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Bytes one rank holds at the worst moment of a step, by kind.

    activations: saved for the backward, and the largest gradient that passes. buckets: parameters
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


class Traffic(NamedTuple):
    """What a rank sends on one axis in a step, in bytes, the seconds its collectives take, and
    how many they are."""

    nbytes: float
    seconds: float
    collectives: int


def footprint(profile: Profile, layout: Layout, training: Training) -> Footprint:
    """The memory of a rank. Exact for parameters, gradients, optimizer and buffers; activations
    (planning/estimate/activations.py) and buckets, two of them at work at once, are models."""
    parameters = gradients = optimizer = 0
    for weight in profile.weights:
        part = weight.part(layout.shard)
        parameters += part * training.stored(weight.kept)
        if weight.trained:
            gradients += part * training.gradient(weight.kept)
            optimizer += part * training.state(weight.kept)
    return Footprint(
        parameters=parameters,
        gradients=gradients,
        optimizer=optimizer,
        activations=profile.activations.saved + profile.activations.transient,
        buckets=_bucket_bytes(profile, layout, training),
        buffers=profile.buffers,
    )


def _bucket_bytes(profile: Profile, layout: Layout, training: Training) -> int:
    if layout.shard * layout.replicate == 1:
        return 0
    gathered, reduced = [], []
    for bucket in buckets(profile, layout):
        gathered.append(sum(w.numel * w.itemsize for w in bucket))
        reduced.append(sum(w.numel * _sent(w, training) for w in bucket if w.trained))
    # a gradient bucket is there twice: its members, and the joined one that is sent
    sending = 2 * max(reduced, default=0)
    if layout.shard == 1:
        return sending
    if layout.zero < 3:
        return sum(gathered) + sending
    return max((a + b for a, b in zip(gathered, [*gathered[1:], 0])), default=0) + sending


def _sent(weight: Weight, training: Training) -> int:
    """Bytes an element of a gradient while it is reduced."""
    return training.gradient(weight.itemsize) if weight.reduced is None else weight.reduced


def buckets(profile: Profile, layout: Layout) -> list[list[Weight]]:
    """The parameters in use, in the order of their first use, as the passes merge them."""
    used = sorted((w for w in profile.weights if w.use is not None), key=lambda w: w.use or 0)
    limit = layout.bucket_bytes or default_bucket_bytes(
        sum(w.numel * w.itemsize for w in used),
        max((reference_bytes(w.itemsize, layout.shard) for w in used), default=0),
    )
    sizes = [weight.numel * weight.itemsize for weight in used]
    filled = fill_buckets(
        sizes, [weight.itemsize for weight in used], limit, layout.bucket_bytes is None
    )
    return [[used[i] for i in bucket] for bucket in filled]


@dataclass(frozen=True)
class Timing:
    """A step in seconds: `exposed` of `step` is communication that the compute waits for."""

    step: float
    compute: float
    exposed: float
    optimizer: float
    traffic: Mapping[str, Traffic]


def timing(
    profile: Profile,
    layout: Layout,
    training: Training,
    cluster: Cluster,
    links: Mapping[str, Link],
) -> Timing:
    """The time of a step on a rank; `links` at the data sheet's rates, by axis."""
    real = {name: cluster.real(link) for name, link in links.items()}
    groups = buckets(profile, layout)
    data: dict[str, Traffic] = {}

    def send(axis: str, op: str, nbytes: float) -> float:
        ranks = layout.shard if axis == "dp_shard" else layout.replicate
        if ranks == 1 or not nbytes:
            return 0.0
        took = cost.collective_seconds(op, nbytes, ranks, real[axis])
        before = data.get(axis, Traffic(0.0, 0.0, 0))
        data[axis] = Traffic(
            before.nbytes + cost.ring_bytes(op, nbytes, ranks),
            before.seconds + took,
            before.collectives + 1,
        )
        return took

    segments = []
    starts = [bucket[0].use or 0 for bucket in groups] or [0]
    ends = [*starts[1:], len(profile.forward)]
    starts[0] = 0
    for bucket, start, end in zip(groups or [[]], starts, ends):
        part = {w.name: w.part(layout.shard) for w in bucket}
        whole = sum(layout.shard * part[w.name] * w.itemsize for w in bucket)
        twice = sum(layout.shard * part[w.name] * w.itemsize for w in bucket if w.again)
        reduced = sum(part[w.name] * _sent(w, training) for w in bucket if w.trained)
        gather = send("dp_shard", "all_gather", whole)
        again = send("dp_shard", "all_gather", twice) if layout.zero == 3 else 0.0
        reduce = send("dp_shard", "reduce_scatter", layout.shard * reduced)
        reduce += send("dp_replicate", "all_reduce", reduced)
        segments.append(
            Segment(
                sum(profile.forward[start:end]),
                sum(profile.backward[start:end]),
                gather,
                again,
                reduce,
            )
        )
    passes = step_seconds(segments)
    update = _update_seconds(profile, layout, training, cluster)
    if profile.n > 1:
        sent = sum(cost.ring_bytes(s.op, s.nbytes, profile.n) for s in profile.sent)
        data["tp"] = Traffic(sent, profile.seconds_sent, len(profile.sent))
    return Timing(passes + update, profile.compute, passes - profile.compute, update, data)


def _update_seconds(
    profile: Profile, layout: Layout, training: Training, cluster: Cluster
) -> float:
    """The optimizer's pass over memory: it reads gradients, reads and writes the rest."""
    moved = 0
    for weight in profile.weights:
        if weight.trained:
            stored = training.stored(weight.kept) + training.state(weight.kept)
            each = training.gradient(weight.kept) + 2 * stored
            moved += weight.part(layout.shard) * each
    return moved / (cluster.device.memory_bandwidth * cluster.efficiency.memory)
