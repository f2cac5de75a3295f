"""The machine this process runs on, described by what its device and its launcher say."""

from __future__ import annotations

import os
from dataclasses import replace

import torch
import torch.distributed as dist

from autoshard.planning.cost.clusters import Cluster, Efficiency, cluster
from autoshard.planning.cost.machines import DEFAULT_HARDWARE, HARDWARE, Hardware

#: What a CPU process may fill of its part of the machine's memory.
_FITS_CPU = 0.8


def cluster_of(device: str) -> Cluster:
    """The cluster of this process's device: its kind and memory, nodes as torchrun says.

    device: "cuda", or anything else for the CPU. A GPU that is not known counts as an h100 with its
    own memory; where there is none (planning offline, on fake devices) as an h100. Links are
    those of the data sheet.
    """
    here = int(os.environ.get("LOCAL_WORLD_SIZE", 0))
    if device != "cuda":
        ranks = here or (dist.get_world_size() if dist.is_initialized() else 1)
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // ranks
        return _resized(cluster("cpu"), memory, ranks, Efficiency(fits=_FITS_CPU))
    if not torch.cuda.is_available():
        return cluster(DEFAULT_HARDWARE)
    seen = torch.cuda.get_device_properties(torch.cuda.current_device())
    name = next((known for known in HARDWARE if known in seen.name.lower()), DEFAULT_HARDWARE)
    ranks = here or torch.cuda.device_count()
    base = cluster(name)
    return _resized(base, seen.total_memory, ranks, base.efficiency)


def hardware_of(device: str) -> Hardware:
    """The planner's description of this process's device."""
    return cluster_of(device).device


def _resized(base: Cluster, memory_bytes: int, per_node: int, share: Efficiency) -> Cluster:
    device = replace(base.device, memory_bytes=memory_bytes)
    return replace(base, device=device, per_node=max(1, per_node), efficiency=share)
