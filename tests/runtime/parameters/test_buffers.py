"""Buffers and tensor attributes that differ between ranks: rank 0's from the first call on."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import nn


class Held(nn.Module):
    """Tensors of a model that are no parameters, each drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 4), nn.BatchNorm1d(8)
        self.register_buffer("scale", torch.rand(8))
        self.register_buffer("order", torch.randperm(8), persistent=False)
        self.register_buffer("kept", (torch.rand(1, 8) > 0.5).expand(3, 8))
        self.register_buffer("unused", torch.rand(3))
        self.norm.running_mean.copy_(torch.rand(8))
        self.plain = torch.rand(8)
        self.several = {"a": [torch.rand(8)]}
        self.later: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x[:, self.order]) * self.scale * self.kept[0]
        x = x + self.plain * self.several["a"][0]
        return self.linear(x if self.later is None else x + self.later)


def first_call(mesh: dict[str, int], how: str, later: bool, train: bool) -> Any:
    """The error of a call with buffers of another seed on each rank; none: how far the output is
    from that of a model that was drawn alike, and whether what the rank set later is its own."""
    torch.compiler.reset()
    rank = int(os.environ["RANK"])
    torch.manual_seed(rank)
    model = Held().train(train)
    torch.manual_seed(0)
    serial = Held().train(train)
    options = {"mesh": mesh, "inner": "eager", "same_inputs": {"weights": how}, "timeout": 60}
    compiled: Any = torch.compile(model, backend="autoshard", options=options)
    if later:
        model.later = torch.full((8,), float(rank))
        serial.later = model.later.clone()
    x = torch.rand(4, 8, generator=torch.Generator().manual_seed(1))
    try:
        with torch.no_grad():
            got = compiled(x)
    except Exception as error:
        return str(error)
    with torch.no_grad():
        off = float((got - serial(x)).abs().max())
    held = zip([*model.buffers(), model.plain], [*serial.buffers(), serial.plain], strict=True)
    return off, all(torch.equal(a, b) for a, b in held)


@pytest.mark.parametrize("axis", ["tp", "dp_replicate", "ep"])
def test_buffers_are_those_of_rank_0(gloo2: Any, axis: str) -> None:
    for off, alike in gloo2(
        first_call, {axis: 2}, "broadcast", axis.startswith("dp"), axis == "tp"
    ):
        assert off < 1e-6 and alike


def test_what_cannot_be_rank_0s_is_an_error(gloo2: Any) -> None:
    text, other = gloo2(first_call, {"dp_replicate": 2}, "trust", False, False)
    assert text == other and "values of buffers" in text and "rank 1: plain: float32 (8,)" in text
    text, other = gloo2(first_call, {"tp": 2}, "broadcast", True, False)
    assert text == other and "self.later" in text, "it may be of a batch: never written to"
