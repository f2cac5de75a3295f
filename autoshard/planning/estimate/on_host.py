"""The optimizer's step on the host, of states that lie in its memory (ZeRO-Offload, arXiv
2101.06840).

    to the host      gradient and parameter of one weight after the other
    the host         the step: one pass over its memory, with what the copies write and read there
    to the device    the parameter

The three run beside each other, and after the backward: the slowest counts, and the first read and
the last write, beside which nothing runs. That is what runtime/host_memory.py does. ZeRO-Offload
sends gradients during the backward; that hides what is hidden here, since the step takes longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autoshard.planning.cost import Cluster
from autoshard.planning.estimate.training import Training
from autoshard.planning.estimate.weights import Layout, Weight
from autoshard.runtime.errors import ConfigError, message


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
            message(
                f"optimizer states on the host: the way to the host of {cluster.name} is not known",
                remedy="Add the entry host to the hardware's file; docs/planning.md shows one.",
            )
        )
    nbytes = read = written = moved = ends = 0
    for weight in weights:
        if not weight.trained:
            continue
        part, kept = weight.part(layout.shard), weight.kept
        stored, gradient = training.stored(kept), training.gradient(kept)
        state = training.all_state(kept)
        # of float32 copies it converts and compares, see runtime/offloaded_optimizer.py
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
