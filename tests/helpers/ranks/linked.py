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
from autoshard.weights.parts import HeldPart, Sender, Tensors
from autoshard.weights.update import Update


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


def some(seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes: list[tuple[int, ...]] = [(7, 12), (9,), (), (4, 6, 5), (12, 3)]
    return {
        f"w{i}": torch.randn(shape, generator=generator).to(dtype) for i, shape in enumerate(shapes)
    }


TRAINS = {"dp_shard": 2}, {"dp_shard": "S(0)"}
SERVES = {"tp": 2}, {"tp": "S(1)"}


def moved(
    link: WeightLink,
    old: Mapping[str, torch.Tensor],
    new: Mapping[str, torch.Tensor],
    **options: Any,
) -> tuple[dict[str, HeldPart], Any]:
    """Ranks 0 and 1 send `new` by rows, ranks 2 and 3 hold `old` by columns, and take it; the parts
    that a rank has then, and its report."""
    mesh, states = TRAINS if link.rank < 2 else SERVES
    held = parts(new if link.rank < 2 else old, states, mesh, link.rank % 2)
    settings = {"version": None, "buffer": 1 << 20, "background": False, **options}
    if link.rank < 2:
        report = Update(link, Sender(held), None, **settings).wait()
    else:
        target = Tensors(held, {name: name for name in held})
        report = Update(link, None, target, **{**settings, "version": None}).wait()
    return held, report
