"""Ranks that hand weights on, as threads of one process, and their parts of tensors."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from autoshard.runtime.mesh import offline_mesh
from autoshard.runtime.parameters import local_bounds
from autoshard.weights import WeightLink
from autoshard.weights.boxes import view
from autoshard.weights.parts import HeldPart


def ranks(size: int, run: Callable[[WeightLink], Any], store: Any = None) -> list[Any]:
    """What `run` returns or raises in each of some threads that have met."""
    store, found = store or dist.HashStore(), [None] * size

    def one(rank: int) -> None:
        try:
            found[rank] = run(WeightLink(store, rank, size, timeout=30))
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def checked(found: Sequence[Any]) -> list[Any]:
    for one in found:
        if isinstance(one, Exception):
            raise one
    return list(found)


def parts(
    wholes: Mapping[str, torch.Tensor],
    states: Mapping[str, str],
    mesh: Mapping[str, int],
    rank: int,
) -> dict[str, HeldPart]:
    """A rank's parts of tensors that are stored alike, in memory of their own."""
    found = {}
    for name, whole in wholes.items():
        axes = offline_mesh(mesh, rank).axes
        fits = {a: s for a, s in states.items() if whole.dim() > int(s[2:-1])}
        box = tuple(local_bounds(whole.shape, fits, axes))
        own = view(whole, tuple((0, n) for n in whole.shape), box).clone()
        found[name] = HeldPart(own, tuple(whole.shape), box, own)
    return found
