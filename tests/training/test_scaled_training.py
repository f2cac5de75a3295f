"""torch.amp.GradScaler on sharded gradients: scale, skip and parameters as on one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import autoshard
from autoshard.verification.comparison import furthest
from joined_batch import Sizes
from side_by_side import difference, whole
from token_net import Net, batch


class Overflowing(nn.Module):
    """Net, whose loss a factor can make infinite in fp16."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, ids: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.net(ids) * factor
        return loss


def lowered(model: nn.Module) -> dict[str, torch.Tensor]:
    return {k: p.to(torch.float16) for k, p in model.named_parameters()}


def scaled(sizes: Sizes, how: str, micro: int) -> dict[str, Any]:
    """Five steps; on the second, one rank's gradients overflow."""
    from autoshard.runtime.mesh import data_coordinate, init_mesh

    mesh = init_mesh(sizes, "cpu")
    rank, ranks = data_coordinate(mesh), mesh.size // mesh.axis("tp").size
    model, serial = Overflowing(), Overflowing()
    options: dict[str, Any] = {"mesh": sizes, "inner": "aot_eager", "zero": 1}
    if how == "precision":
        options["precision"] = {"param": "float16", "reduce": "float32"}
    compiled: Any = torch.compile(model, backend="autoshard", options=options)
    settings: Any = {"init_scale": 2.0**10, "growth_interval": 2}
    ours, theirs = (torch.amp.GradScaler("cpu", **settings) for _ in range(2))
    optimizer, reference = (
        torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, serial)
    )
    worst, scales, skipped = 0.0, [], []
    for step in range(5):
        for i in range(micro):
            ids = batch(step * micro + i)
            for other in range(ranks):
                bad = step == 1 and other == ranks - 1 and i == 0
                factor = torch.tensor(1e8 if bad else 1.0)
                own = ids.chunk(ranks)[other]
                with torch.autocast("cpu", dtype=torch.float16, enabled=how == "autocast"):
                    if how == "precision":
                        loss = torch.func.functional_call(serial, lowered(serial), (own, factor))
                    else:
                        loss = serial(own, factor)
                theirs.scale(loss / micro / ranks).backward()
                if other == rank:
                    with autoshard.no_sync(compiled) if i + 1 < micro else torch.enable_grad():
                        with torch.autocast("cpu", torch.float16, enabled=how == "autocast"):
                            loss = compiled(own, factor)
                        ours.scale(loss / micro).backward()
        before = [whole(p).detach().clone() for p in model.parameters()]
        norms = []
        for scaler, each, m in ((ours, optimizer, model), (theirs, reference, serial)):
            scaler.unscale_(each)
            norms.append(float(whole(torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0))))
            scaler.step(each)
            scaler.update()
            each.zero_grad()
        scales.append((ours.get_scale(), theirs.get_scale()))
        skipped.append(all(torch.equal(whole(p), b) for p, b in zip(model.parameters(), before)))
        if step != 1:
            worst = furthest([worst, abs(norms[0] - norms[1]) / norms[1]])
    for p, q in zip(model.parameters(), serial.parameters()):
        worst = furthest([worst, difference(p, q, 1.0)])
    return {"worst": worst, "scales": scales, "skipped": skipped}


@pytest.mark.parametrize(
    ("sizes", "how", "micro"),
    [
        ({"dp_shard": 2}, "precision", 1),
        ({"dp_replicate": 2}, "autocast", 2),
        ({"tp": 2}, "autocast", 1),
    ],
)
def test_five_scaled_steps(gloo2: Any, sizes: Sizes, how: str, micro: int) -> None:
    """unscale_, clip, step, update; an inf on one rank skips the step on every rank."""
    for result in gloo2(scaled, sizes, how, micro):
        assert result["skipped"] == [False, True, False, False, False], result
        assert all(mine == serial for mine, serial in result["scales"]), result
        assert result["scales"][1][0] < result["scales"][0][0]
        assert result["worst"] < 1e-3, result


@pytest.mark.slow
def test_five_scaled_steps_on_two_axes(gloo4: Any) -> None:
    for sizes in ({"dp_shard": 2, "tp": 2}, {"dp_replicate": 2, "dp_shard": 2}):
        for result in gloo4(scaled, sizes, "autocast", 2):
            assert result["skipped"] == [False, True, False, False, False], result
            assert all(mine == serial for mine, serial in result["scales"]), result
            assert result["worst"] < 1e-3, result
