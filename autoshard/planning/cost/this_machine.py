"""The machine this process runs on, described by what its device and its launcher say."""

from __future__ import annotations

import os
from dataclasses import replace

import torch
import torch.distributed as dist

from autoshard.planning.cost.clusters import (
    DEFAULT_HARDWARE,
    HARDWARE,
    Cluster,
    Efficiency,
    cluster,
)

#: What a CPU process may fill of its part of the machine's memory.
_FITS_CPU = 0.8


def cluster_of(device: str) -> Cluster:
    """The cluster of this process's device: its kind and memory, nodes as torchrun says.

    device: "cuda", or anything else for the CPU. A GPU that is not known counts as an h100 with its
    own memory; where there is none (planning offline, on fake devices) as an h100. Links are
    those of the data sheet. A process that no launcher started plans for nodes of the built-in
    machine's size, or of the devices that it sees, where those are several.
    """
    here = _ranks_a_node()
    if device != "cuda":
        base = cluster("cpu")
        world = dist.get_world_size() if dist.is_initialized() else 1
        ranks = here or max(world, base.per_node)
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // ranks
        return _resized(base, memory, ranks, Efficiency(fits=_FITS_CPU))
    if not torch.cuda.is_available():
        return cluster(DEFAULT_HARDWARE)
    seen = torch.cuda.get_device_properties(torch.cuda.current_device())
    name = next((known for known in HARDWARE if known in seen.name.lower()), DEFAULT_HARDWARE)
    base, seen_here = cluster(name), torch.cuda.device_count()
    ranks = here or (seen_here if seen_here > 1 else base.per_node)
    return _resized(base, seen.total_memory, ranks, base.efficiency)


def _ranks_a_node() -> int:
    """As torchrun says, the mean where nodes differ, alike on all ranks; 0 without it."""
    world, nodes = (int(os.environ.get(name, 0)) for name in ("WORLD_SIZE", "GROUP_WORLD_SIZE"))
    return world // nodes if nodes else int(os.environ.get("LOCAL_WORLD_SIZE", 0))


def _resized(base: Cluster, memory_bytes: int, per_node: int, share: Efficiency) -> Cluster:
    device = replace(base.device, memory_bytes=memory_bytes)
    return replace(base, device=device, per_node=per_node, efficiency=share)
