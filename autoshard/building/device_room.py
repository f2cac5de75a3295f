"""The bytes that the tensors of a rank may fill where nobody said: of the smallest device."""

from __future__ import annotations

import torch
import torch.distributed as dist

from autoshard.planning.cost import cluster_of
from autoshard.runtime.agreement import gather
from autoshard.runtime.collectives import Axis

_rooms: dict[int, int] = {}
"""By the id of the world's group: asked once, when all ranks build their first program."""


def device_room(device: str) -> int | None:
    """Bytes of the smallest device of the world that tensors may fill; None on a CPU, whose memory
    others use too. Collective at the first call of a world."""
    if device != "cuda" or not torch.cuda.is_available():
        return None
    here = cluster_of(device).usable_bytes
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return here
    assert dist.group.WORLD is not None
    if id(dist.group.WORLD) not in _rooms:
        group = dist.group.WORLD
        world = Axis("world", dist.get_world_size(), dist.get_rank(), group.group_name)
        _rooms[id(group)] = min(gather(here, "memory of the devices", world))
    return _rooms[id(dist.group.WORLD)]
