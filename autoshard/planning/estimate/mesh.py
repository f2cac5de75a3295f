"""The seconds of one row of `autoshard plan`: a profile on a mesh.

The data-parallel axes are not searched node by node: what they do follows from the mesh, so it is
computed. Collectives are those of traffic.py; buckets fill in the order of use by the rule of the
passes (planning/cost/merged.py).

When a step is over: compute on one queue, data-parallel collectives on another. That is a model of
what the passes make of the graph (passes/schedule_collectives.py): the gather of a bucket of
parameters starts where the bucket before it is waited for, the reduction of a bucket's gradients
where the last of them is made, and reductions are waited for at the end. Collectives of the
data-parallel axes share one queue in the order of their start, as one communicator has it. Exposed
is what the compute waits: the end of both queues less the compute itself.

The optimizer's step on the host, of states that lie in its memory (ZeRO-Offload, arXiv 2101.06840):

    to the host      gradient and parameter of one weight after the other
    the host         the step: one pass over its memory, with what the copies write and read there
    to the device    the parameter

The three run beside each other, and after the backward: the slowest counts, and the first read and
the last write, beside which nothing runs. That is what runtime/host_memory.py does. ZeRO-Offload
sends gradients during the backward; that hides what is hidden here, since the step takes longer.

The step of matrices that have owners is the optimizer's own code, written down on the meta device:
work, owners and what travels are computed as where it runs (runtime/optimizer/).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from autoshard.planning.cost import WAIT_SECONDS, Cluster, Link, Machine
from autoshard.planning.estimate.step_profile import Profile
from autoshard.planning.estimate.traffic import (
    Sent,
    Traffic,
    data_collectives,
    seconds,
    sent_by_axis,
)
from autoshard.planning.estimate.weights import Layout, Training, Weight, buckets
from autoshard.runtime.collectives import WHOLE, I, State, shard_dim
from autoshard.runtime.errors import ConfigError
from autoshard.runtime.mesh import PLANNED, offline_mesh
from autoshard.runtime.optimizer import Rates, SharedMatrix, Sharers, assign_owners


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
    ranks = {**planned, **layout.ranks}
    waited, *waits = waits_of(profile, ranks, real)
    forward, backward = (
        list(map(sum, zip(*each))) for each in zip((profile.forward, profile.backward), waits)
    )
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
    often = [(data, 1), (repeated, times - 1), (waited, times)]
    sent = sent_by_axis(((one, n) for each, n in often if n for one in each), ranks, real)
    busy = times * compute
    return Timing(passes + update, busy, passes - busy, update, sent)


def waits_of(
    profile: Profile, ranks: Mapping[str, int], links: Mapping[str, Link]
) -> tuple[list[Sent], list[float], list[float]]:
    """The collectives that are waited for where they stand, on the planned axis, and on ep for rows
    of experts; and the seconds that each operator waits, forward and backward."""
    travel = profile.exchanges if ranks["ep"] > 1 else ()
    sent = [*profile.sent, *(sent for mixture in travel for sent in mixture)]
    forward, backward = ([0.0] * len(profile.forward) for _ in range(2))
    for one in sent:
        (backward if one.backward else forward)[one.at] += _waited(one, profile, ranks, links)
    for mixture in travel:
        forward[mixture[0].at] += WAIT_SECONDS  # the host reads how many rows arrive
    return sent, forward, backward


def _waited(
    one: Sent, profile: Profile, ranks: Mapping[str, int], links: Mapping[str, Link]
) -> float:
    """Seconds of a collective on the planned axis, less what products in one operator with it hide.
    In backward such a product, of the gradient with the weight, takes as long as in forward."""
    took = seconds(one, ranks, links)
    if one.copies:
        took *= 1 - links[one.axis].rows.overlap
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
    """Seconds of the optimizer's pass."""
    if training.states == "host":
        return host_update(profile.weights, layout, training, cluster).seconds
    each = (weight.holds(weight.stored_part(layout), training) for weight in profile.weights)
    moved = sum(one.updated for one in each)
    owned = owned_update(profile.weights, layout, training, cluster, profile.n)
    return moved / (cluster.device.memory_bandwidth * cluster.efficiency.memory) + owned.seconds


class Segment(NamedTuple):
    """The part of a step that starts where a bucket of parameters is first used. Seconds.

    forward, backward: compute. gather: of its parameters, and again in backward where `regather`.
    reduce: of its gradients, over all data-parallel axes.
    """

    forward: float
    backward: float
    gather: float = 0.0
    regather: float = 0.0
    reduce: float = 0.0


def step_seconds(segments: Sequence[Segment]) -> float:
    """Seconds from the first gather to the end of compute and of communication."""
    now = queue = 0.0  # when the compute, and the queue of collectives, are free
    order = [(s.gather, s.forward, 0.0) for s in segments]
    now, queue = _pass(order, now, queue)
    order = [(s.regather, s.backward, s.reduce) for s in reversed(segments)]
    return max(_pass(order, now, queue))


def _pass(
    order: Sequence[tuple[float, float, float]], now: float, queue: float
) -> tuple[float, float]:
    """When compute and queue are free after a pass over (gather, compute, reduce)s in order."""
    ready = 0.0
    for i, (gather, compute, reduce) in enumerate(order):
        if i == 0 and gather:
            ready = queue = max(queue, now) + gather
        now = max(now, ready)
        following = order[i + 1][0] if i + 1 < len(order) else 0.0
        if following:  # starts where this one was waited for
            ready = queue = max(queue, now) + following
        now += compute
        if reduce:
            queue = max(queue, now) + reduce
    return now, queue


@dataclass(frozen=True, kw_only=True)
class HostUpdate:
    """One rank's optimizer on its host.

    nbytes: of states there. seconds: of all. reads, work, writes: seconds of gradients and
    parameters on their way there, of the step, and of parameters on their way back.
    """

    nbytes: int
    seconds: float
    reads: float
    work: float
    writes: float


def host_update(
    weights: Sequence[Weight], layout: Layout, training: Training, cluster: Cluster
) -> HostUpdate:
    """What the step of `weights` takes. Raises ConfigError where no link to the host is known."""
    if cluster.device.host is None:
        raise ConfigError(
            f"optimizer states on the host: the way to the host of {cluster.name} is not known",
            remedy="Add the entry host to the hardware's file; docs/planning.md shows one.",
        )
    nbytes = read = written = moved = ends = 0
    for weight in weights:
        if not weight.trained:
            continue
        part, kept = weight.stored_part(layout), weight.kept
        stored, gradient = training.stored(kept), training.gradient(kept)
        state = weight.states(training)
        # of float32 copies it converts and compares, see runtime/optimizer/offloaded.py
        wide = training.recipe == "master"  # the copies are among the states
        stepped, parameter = (4, 0) if wide else (gradient, stored)
        copied = 12 + 5 * stored if wide else 0
        nbytes += part * state
        read += part * (gradient + stored)
        written += part * stored
        moved += part * (stepped + 2 * (parameter + state) + copied + gradient + 2 * stored)
        ends = max(ends, part * (gradient + 2 * stored))
    if not moved:
        return HostUpdate(nbytes=0, seconds=0.0, reads=0.0, work=0.0, writes=0.0)
    reads, writes = cluster.host_seconds(read), cluster.host_seconds(written)
    work = moved / (cluster.device.host_memory_bandwidth * cluster.efficiency.memory)
    return HostUpdate(
        nbytes=nbytes,
        seconds=max(reads, work, writes) + cluster.host_seconds(ends),
        reads=reads,
        work=work,
        writes=writes,
    )


class OwnedUpdate(NamedTuple):
    """The step of all matrices that have owners.

    matrices: how many, each of a stack by itself. flops: of all ranks together, once a matrix.
    seconds: of the rank that does most. sent: bytes of all ranks. states: bytes that owners alone
    keep, of a rank in the mean.
    """

    matrices: int = 0
    flops: float = 0.0
    seconds: float = 0.0
    sent: int = 0
    states: int = 0


def owned_update(
    weights: Sequence[Weight], layout: Layout, training: Training, cluster: Cluster, n: int
) -> OwnedUpdate:
    """The step of all weights that have owners, on a rank of the planned axis of `n`."""
    chosen = [weight for weight in weights if weight.work(training).flops]
    if not chosen:
        return OwnedUpdate()
    split = {"ep": layout.inner, "dp_shard": layout.shard // layout.inner}
    sizes = {"dp_replicate": layout.replicate, **split, "tp": n}
    ranks = math.prod(sizes.values())
    axes = tuple(offline_mesh(sizes, rank).axes for rank in range(ranks))
    sharers = Sharers(tuple(range(ranks)), axes, None, None)
    known: dict[Any, SharedMatrix] = {}
    matrices = []
    for weight in chosen:
        states: dict[str, State] = dict.fromkeys(split, "S(0)")
        states["tp"] = weight.state if shard_dim(weight.state) is not None else I
        if weight.choice == WHOLE:
            states["dp_shard"] = I
        key = weight.whole_shape, weight.kept, tuple(states.items())
        if key not in known:
            shape = torch.Size(weight.whole_shape)
            known[key] = SharedMatrix(shape, states, sharers, weight.work(training))
        one = copy.copy(known[key])
        one.rows = list(one.rows)
        matrices.append(one)
    link = cluster.link(ranks, 1).bandwidth * cluster.efficiency.links
    rates = Rates(
        cluster.device.peak(matrices[0].work.dtype) * cluster.efficiency.compute,
        cluster.device.memory_bandwidth * cluster.efficiency.memory,
        link,
    )
    return OwnedUpdate(
        matrices=sum(one.shape[0] if one.work.by_rows else 1 for one in matrices),
        flops=sum(one.work.flops for one in matrices),
        seconds=assign_owners(matrices, [None] * len(matrices), rates),
        sent=sum(one.nbytes() for one in matrices),
        states=sum(one.work.states for one in matrices) // ranks,
    )
