"""The seconds of one row of `autoshard plan`: a profile on a mesh.

The data-parallel axes are not searched node by node: what they do follows from the mesh, so it is
computed. Collectives are those of traffic.py; buckets fill in the order of use by the rule of the
passes (planning/cost/bucket_size.py), and overlap as overlap.py says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autoshard.planning.cost import WAIT_SECONDS, Cluster, Link, Machine
from autoshard.planning.estimate.on_host import host_update
from autoshard.planning.estimate.overlap import Segment, step_seconds
from autoshard.planning.estimate.step_profile import Profile
from autoshard.planning.estimate.traffic import (
    Sent,
    Traffic,
    data_collectives,
    seconds,
    sent_by_axis,
)
from autoshard.planning.estimate.training import Training
from autoshard.planning.estimate.weights import Layout, buckets
from autoshard.runtime.mesh import PLANNED


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
    machine: Machine,
) -> Timing:
    """The time of a step on a rank.

    A collective on tp or cp, or of experts' rows, is waited for where it stands, but for what a
    product hides that it is one operator with; those of a bucket of parameters overlap.
    """
    real = machine.real_links
    planned = dict.fromkeys(PLANNED, profile.n)  # which of the two, each collective says
    if layout.outer > 1:
        planned["cp"] = layout.outer
    shard = layout.shard // (layout.experts * layout.outer)
    data_ranks = {"dp_shard": shard, "dp_replicate": layout.replicate, "ep": layout.experts}
    ranks = {**planned, **data_ranks}
    forward, backward = list(profile.forward), list(profile.backward)
    travel = profile.exchanges if layout.experts > 1 else ()
    waited = [*profile.sent, *(sent for one in travel for sent in one.sent)]
    for one in waited:
        (backward if one.backward else forward)[one.at] += _waited(one, profile, ranks, real)
    for mixture in travel:
        forward[mixture.sent[0].at] += WAIT_SECONDS  # the host reads how many rows arrive
    groups = buckets(profile.weights, layout) or [[]]
    starts = [0, *(bucket[0].use or 0 for bucket in groups[1:])]
    data: list[Sent] = []
    segments = []
    for bucket, start, end in zip(groups, starts, [*starts[1:], len(forward)]):
        own = data_collectives(bucket, layout, training)
        data += own
        took = {"gather": 0.0, "regather": 0.0, "reduce": 0.0}
        for one in own:
            again = "regather" if one.backward else "gather"
            took[again if one.op == "all_gather" else "reduce"] += seconds(one, ranks, real)
        segments.append(Segment(sum(forward[start:end]), sum(backward[start:end]), **took))
    times, compute = training.microbatches, profile.compute
    alone = sum(forward) + sum(backward)
    slows = 1 - machine.efficiency.overlap
    passes = times * _pass_seconds(segments, alone, slows)
    repeated = data
    if layout.deferred:  # the first microbatches reduce nothing
        silent = [one._replace(reduce=0.0) for one in segments]
        passes = _pass_seconds(segments, alone, slows)
        passes += (times - 1) * _pass_seconds(silent, alone, slows)
        repeated = [one for one in data if one.op == "all_gather"]
    update = update_seconds(profile, layout, training, machine)
    sent = sent_by_axis([*data, *waited, *[*repeated, *waited] * (times - 1)], ranks, real)
    busy = times * compute
    return Timing(passes + update, busy, passes - busy, update, sent)


def _waited(
    one: Sent, profile: Profile, ranks: Mapping[str, int], links: Mapping[str, Link]
) -> float:
    """Seconds of a collective on the planned axis, less what products in one operator with it hide.
    In backward such a product, of the gradient with the weight, takes as long as in forward."""
    took = seconds(one, ranks, links)
    products = sum(profile.forward[i] for i in one.beside)
    if profile.fusing is None or not products:
        return took
    on_the_wire = took - one.copied / links[one.axis].copy_bandwidth
    return took - profile.fusing.gain(on_the_wire, products)


def _pass_seconds(segments: Sequence[Segment], alone: float, slows: float) -> float:
    """A forward and a backward with their collectives. alone: without those of parameters. slows:
    of a hidden collective, the part that the compute takes longer."""
    passes = step_seconds(segments)
    hidden = sum(one.gather + one.regather + one.reduce for one in segments) - (passes - alone)
    return passes + slows * hidden


def update_seconds(profile: Profile, layout: Layout, training: Training, cluster: Cluster) -> float:
    """Seconds of the optimizer's pass: it reads gradients, reads and writes the rest."""
    if training.states == "host":
        return host_update(profile.weights, layout, training, cluster).seconds
    moved = 0
    for weight in profile.weights:
        if weight.trained:
            stored = training.stored(weight.kept) + training.state(weight.kept)
            each = training.gradient(weight.kept) + 2 * stored
            moved += weight.stored_part(layout) * each
    return moved / (cluster.device.memory_bandwidth * cluster.efficiency.memory)
