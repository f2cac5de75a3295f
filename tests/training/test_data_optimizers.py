"""AdamW in all its forms, with a learning-rate schedule, on DTensors: equal to serial training."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from autoshard.verification.comparison import furthest
from joined_batch import MATRIX, Sizes, part, serial_backward
from models import CASES
from side_by_side import difference

FORMS: dict[str, dict[str, bool]] = {
    "one by one": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}


def warm_up_and_decay(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Schedulers of three kinds, one of which also moves the betas."""
    lr_scheduler = torch.optim.lr_scheduler
    return [
        lr_scheduler.LinearLR(optimizer, 0.25, total_iters=2),
        lr_scheduler.ExponentialLR(optimizer, 0.7),
        lr_scheduler.CyclicLR(optimizer, 1e-3, 2e-2, 2, cycle_momentum=True),
    ]


def train(name: str, sizes: Sizes, zero: int, form: dict[str, bool]) -> dict[str, float]:
    """Four steps on the mesh and serially; the worst difference of parameters, of optimizer state
    and of learning rates, relative to the largest value of each tensor."""
    from autoshard.runtime.mesh import init_mesh

    case = CASES[name]
    model = case.make_model()
    serial = copy.deepcopy(model)
    mesh = init_mesh(sizes, "cpu")
    replicate, shard = mesh.axis("dp_replicate"), mesh.axis("dp_shard")
    ranks, rank = replicate.size * shard.size, replicate.rank * shard.size + shard.rank
    options = {"mesh": sizes, "zero": zero, "inner": "aot_eager"}
    compiled = torch.compile(model, backend="autoshard", options=options)
    # eps: a gradient that is nothing but rounding must not become a step of the learning rate
    settings: dict[str, Any] = {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.1, **form}
    optimizer = torch.optim.AdamW(model.parameters(), **settings)
    reference = torch.optim.AdamW(serial.parameters(), **settings)
    schedules = [warm_up_and_decay(one) for one in (optimizer, reference)]
    worst = {"parameter": 0.0, "state": 0.0, "rate": 0.0}
    rates = set()
    for step in range(4):
        batch = case.make_batch(step)
        buffers = [{k: b.clone() for k, b in serial.named_buffers()} for _ in range(ranks)]
        serial_backward(case, serial, batch, buffers, 1.0)
        case.loss(compiled, part(batch, ranks, rank)).backward()
        for one, own in zip((optimizer, reference), schedules):
            one.step()
            one.zero_grad()
            for schedule in own:
                schedule.step()
        ours, theirs = optimizer.param_groups[0], reference.param_groups[0]
        rates.add(ours["lr"])
        worst["rate"] = furthest([worst["rate"], abs(ours["lr"] - theirs["lr"])])
        assert ours["betas"] == theirs["betas"]
        for (key, p), q in zip(model.named_parameters(), serial.parameters(), strict=True):
            worst["parameter"] = furthest([worst["parameter"], difference(p, q, 1e-2)])
            for kind in ("exp_avg", "exp_avg_sq"):
                held, want = optimizer.state[p][kind], reference.state[q][kind]
                assert held.shape == want.shape, key
                worst["state"] = furthest([worst["state"], difference(held, want, 1e-2)])
    assert len(rates) > 2, "the schedule did nothing"
    return worst


@pytest.mark.parametrize(
    ("sizes", "zero", "form"),
    [
        (sizes, zero, form)
        if (sizes, form) == ({"dp_shard": 2}, "fused") and zero == 3
        else pytest.param(sizes, zero, form, marks=pytest.mark.slow)
        for sizes, zero in [*MATRIX, ({"tp": 2}, 3)]
        for form in FORMS
    ],
)
def test_adamw_and_its_schedule(gloo2: Any, gloo4: Any, sizes: Sizes, zero: int, form: str) -> None:
    pool = gloo4 if len(sizes) == 2 else gloo2
    for worst in pool(train, "mlp", sizes, zero, FORMS[form]):
        assert worst["rate"] == 0, worst
        assert furthest(worst.values()) < 1e-5, worst
