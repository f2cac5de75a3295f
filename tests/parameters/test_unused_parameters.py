"""Parameters without a gradient: found when the graph is made, reported, and nobody's wait."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.distributed.tensor import DTensor

import autoshard
from gloo_pool import GlooPool


class Partly(nn.Module):
    """One weight that is trained, one that is read without gradient, one that is not read."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.frozen_here, self.never = [nn.Linear(8, 8) for _ in range(3)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            x = self.frozen_here(x)
        return self.used(x).square().mean()


WITHOUT = ["frozen_here.weight", "frozen_here.bias", "never.weight", "never.bias"]


def test_explain_names_them() -> None:
    for mesh in ({"dp_shard": 2}, {"dp_replicate": 2}, {"tp": 2}):
        program = autoshard.trace(Partly(), (torch.ones(2, 8),), mesh=mesh, inner="aot_eager")
        assert sorted(program.without_gradient()) == sorted(WITHOUT), mesh
        text = program.explain()
        assert "no gradient in this graph" in text and "frozen_here.weight" in text
        reduced = [c for c in program.collectives() if c.phase == "backward" and "dp" in c.axis]
        assert all("used" in c.module for c in reduced)
    program = autoshard.trace(
        nn.Linear(8, 8), (torch.ones(2, 8),), mesh={"dp_shard": 2}, inner="aot_eager"
    )
    assert program.without_gradient() == [] and "no gradient" not in program.explain()


def test_a_tied_weight_is_read_under_either_name() -> None:
    tied = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    tied[1].weight = tied[0].weight
    program = autoshard.trace(tied, (torch.ones(2, 8),), mesh={"dp_shard": 2})
    assert program.absent == ()


def two_steps() -> dict[str, bool | float]:
    model = Partly()
    serial = copy.deepcopy(model)
    options = {"mesh": {"dp_shard": 2}, "inner": "aot_eager"}
    compiled = torch.compile(model, backend="autoshard", options=options)
    x = torch.randn(4, 8)
    for _ in range(2):
        compiled(x).backward()
        serial(x).backward()
    parameters = dict(model.named_parameters())
    have: dict[str, bool | float] = {name: p.grad is None for name, p in parameters.items()}
    gradient, want = parameters["used.weight"].grad, serial.used.weight.grad
    assert isinstance(gradient, DTensor) and want is not None
    return {**have, "error": float((gradient.full_tensor() - want).abs().max())}


def test_nobody_waits_for_them(gloo2: GlooPool) -> None:
    for found in gloo2(two_steps, pool_timeout=120.0):
        assert found.pop("error") < 1e-6
        assert [name for name, missing in found.items() if missing] == WITHOUT
