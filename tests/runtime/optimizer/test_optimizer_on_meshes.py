"""`autoshard.optimizer` on meshes: clipped steps beside those of one device."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from test_optimizer_on_parts import Lion
from torch import nn, optim

import autoshard
from autoshard.verification.comparison import furthest
from joined_batch import Sizes
from side_by_side import difference
from token_net import Net, batch

ELEMENTWISE: dict[str, Any] = {
    "AdamW foreach": functools.partial(optim.AdamW, lr=1e-2, eps=1e-3, foreach=True),
    "AdamW fused": functools.partial(optim.AdamW, lr=1e-2, eps=1e-3, fused=True),
    "SGD": functools.partial(optim.SGD, lr=0.1, momentum=0.9),
    "NAdam": functools.partial(optim.NAdam, lr=1e-2, eps=1e-3),
    "Lion": functools.partial(Lion, lr=1e-3),
}
WHOLE: dict[str, Any] = {
    "Adafactor": functools.partial(optim.Adafactor, lr=1e-2),
    "LBFGS": functools.partial(optim.LBFGS, lr=0.1, max_iter=3),
}


def steps(model: Any, call: Any, optimizer: Any, rows: Any, numbers: range = range(3)) -> None:
    """Clipped steps under a schedule; LBFGS takes its gradients, unclipped, from the closure."""
    schedule = optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

    def closure(number: int) -> torch.Tensor:
        optimizer.zero_grad()
        loss = call(rows(number))
        loss.backward()
        return loss.detach()  # type: ignore[no-any-return]

    for number in numbers:
        if isinstance(optimizer, optim.LBFGS):
            optimizer.step(functools.partial(closure, number))  # type: ignore[arg-type]
        else:
            closure(number)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
        schedule.step()


def beside_serial(sizes: Sizes, names: list[str]) -> dict[str, float]:
    """The worst difference from serial of each optimizer, whose steps are also those of stored
    tensors, bit for bit."""
    from autoshard.runtime.mesh import data_coordinate, init_mesh

    mesh = init_mesh(sizes, "cpu")
    rank, ranks = data_coordinate(mesh), mesh.batches
    model = Net()
    compiled = torch.compile(
        model, backend="autoshard", options={"mesh": sizes, "inner": "aot_eager"}
    )

    def own(number: int) -> torch.Tensor:
        return batch(number).chunk(ranks)[rank]

    compiled(own(0)).backward()
    worst = {}
    for name in names:
        make = {**ELEMENTWISE, **WHOLE}[name]
        serial = Net()
        steps(serial, serial, make(serial.parameters()), batch)
        found: list[Any] = []
        for way in (autoshard.optimizer, lambda given: given):
            with torch.no_grad():
                for p, q in zip(model.parameters(), Net().parameters()):
                    p.copy_(q)
            model.zero_grad()
            steps(model, compiled, way(make(model.parameters())), own)
            found.append([p.detach().full_tensor() for p in model.parameters()])  # type: ignore[operator]
        assert all(map(torch.equal, *found)), name
        errors = (difference(p, q, 1.0) for p, q in zip(found[0], serial.parameters()))
        worst[name] = furthest(errors)
    return worst


@pytest.mark.parametrize("sizes", [{"tp": 2}, {"dp_shard": 2}, {"dp_replicate": 2}])
def test_clipped_steps_are_those_of_one_device(gloo2: Any, sizes: Sizes) -> None:
    names = [*ELEMENTWISE, *(WHOLE if "tp" in sizes else ["Adafactor"])]
    for worst in gloo2(beside_serial, sizes, names):
        assert worst.keys() == set(names) and all(error < 1e-5 for error in worst.values()), worst
