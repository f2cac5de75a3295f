"""`autoshard.optimizer` on meshes: clipped steps beside those of one device."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_optimizer_on_parts import Lion
from torch import nn, optim
from torch.distributed.tensor import DTensor

import autoshard
from autoshard.verification.comparison import furthest, largest
from joined_batch import Sizes
from side_by_side import whole
from token_net import Net, batch

OPTIMIZERS: dict[str, Any] = {
    "AdamW foreach": functools.partial(optim.AdamW, lr=1e-2, eps=1e-3, foreach=True),
    "AdamW fused": functools.partial(optim.AdamW, lr=1e-2, eps=1e-3, fused=True),
    "SGD": functools.partial(optim.SGD, lr=0.1, momentum=0.9),
    "NAdam": functools.partial(optim.NAdam, lr=1e-2, eps=1e-3),
    "Lion": functools.partial(Lion, lr=1e-3),
    "Adafactor": functools.partial(optim.Adafactor, lr=1e-2),
    "LBFGS": functools.partial(optim.LBFGS, lr=0.1, max_iter=3),
}


Losses = Callable[[int], torch.Tensor]


def steps(model: Any, loss: Losses, optimizer: Any) -> list[torch.Tensor]:
    """The parameters after clipped steps under a schedule; LBFGS takes its gradients, unclipped,
    from the closure, whose loss is that of all ranks."""
    schedule = optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    stored = any(isinstance(p, DTensor) for p in model.parameters())

    def closure(number: int) -> torch.Tensor:
        optimizer.zero_grad()
        value = loss(number)
        value.backward()
        value = whole(value).detach().clone()
        if stored:
            dist.all_reduce(value)
            value /= dist.get_world_size()
        return value

    for number in range(3):
        if isinstance(optimizer, optim.LBFGS):
            optimizer.step(functools.partial(closure, number))  # type: ignore[arg-type]
        else:
            closure(number)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
        schedule.step()
    return [whole(p.detach()).clone() for p in model.parameters()]


def beside_serial(sizes: Sizes, names: list[str]) -> dict[str, float]:
    """How far each optimizer is from serial, relative to how far that moved; its steps are also
    those of stored tensors, bit for bit."""
    from autoshard.runtime.mesh import data_coordinate, init_mesh

    mesh = init_mesh(sizes, "cpu")
    rank, ranks = data_coordinate(mesh), mesh.batches
    model = Net().double()
    serial = copy.deepcopy(model)
    start = [p.detach().clone() for p in model.parameters()]
    options = {"mesh": sizes, "inner": "aot_eager"}
    compiled = torch.compile(model, backend="autoshard", options=options)

    def begin(one: nn.Module) -> None:
        one.zero_grad()
        with torch.no_grad():
            for p, value in zip(one.parameters(), start):
                p.copy_(value)

    def own(number: int) -> torch.Tensor:
        return compiled(batch(number).chunk(ranks)[rank])  # type: ignore[no-any-return]

    own(0).backward()
    worst = {}
    for name in names:
        make = OPTIMIZERS[name]
        begin(serial)
        want = steps(serial, lambda number: serial(batch(number)), make(serial.parameters()))
        found = []
        for way in (autoshard.optimizer, lambda given: given):
            begin(model)
            found.append(steps(model, own, way(make(model.parameters()))))
        assert all(map(torch.equal, *found)), name
        moved = [largest(q - p) for p, q in zip(start, want)]
        errors = [largest(p - q) for p, q in zip(found[0], want)]
        worst[name] = furthest(e / max(m, 1e-3 * max(moved)) for e, m in zip(errors, moved))
    return worst


@pytest.mark.parametrize("sizes", [{"tp": 2}, {"dp_shard": 2}])
def test_clipped_steps_are_those_of_one_device(gloo2: Any, sizes: Sizes) -> None:
    for worst in gloo2(beside_serial, sizes, [*OPTIMIZERS]):
        assert all(error < 1e-5 for error in worst.values()), worst


@pytest.mark.slow
def test_clipped_steps_on_two_axes_are_those_of_one_device(gloo4: Any) -> None:
    for worst in gloo4(beside_serial, {"dp_shard": 2, "tp": 2}, [*OPTIMIZERS]):
        assert all(error < 1e-5 for error in worst.values()), worst
