"""The bytes that the tensors of a rank may fill where nobody said: of the smallest device."""

from __future__ import annotations

import torch
import torch.distributed as dist

from autoshard.planning.cost import cluster_of
from autoshard.runtime import compat
from autoshard.runtime.agreement import gather
from autoshard.runtime.collectives import Axis


def device_room(device: str) -> int | None:
    """Bytes of the smallest device of the world that tensors may fill; None on a CPU, whose memory
    others use too. Collective at the first call of a world."""
    if device != "cuda" or not torch.cuda.is_available():
        return None
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return cluster_of(device).usable_bytes
    return _smallest(device)


@compat.once_a_world
def _smallest(device: str) -> int:
    """Asked when all ranks build their first program."""
    assert dist.group.WORLD is not None
    group = dist.group.WORLD.group_name
    world = Axis("world", dist.get_world_size(), dist.get_rank(), group)
    return min(gather(cluster_of(device).usable_bytes, "memory of the devices", world))
