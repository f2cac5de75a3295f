"""What eager code makes of stored tensors enters compiled frames: values and gradients of the
serial model."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from autoshard.errors import AutoshardError
from gloo_pool import GlooPool
from sharded import assert_same

EXPERTS, INNER, HIDDEN = 3, 5, 8


class Expert(nn.Module):
    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        return torch.tanh(x @ w.reshape(-1, HIDDEN).T).square().sum()


class Decay(nn.Module):
    def forward(self, w: Tensor) -> None:
        with torch.no_grad():
            w.mul_(0.5)


class Loop(nn.Module):
    """A loop over data breaks the graph, and is eager code (as DBRX's, over its experts)."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(HIDDEN, HIDDEN)
        self.weight = nn.Parameter(torch.randn(EXPERTS * INNER, HIDDEN) * 0.3)
        self.expert, self.decay = Expert(), Decay()
        self.decays = False  # not before the parameter is stored: writes of graphs are refused

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        total = x.sum()
        for i in torch.ones(EXPERTS).nonzero():
            if self.decays and i[0] == 0:  # before what is read: serial's saved values change too
                kept = self.weight.data[1:]
                self.decay(self.weight.data[1:4])
                self.decay(self.weight.data)
                total = total + self.expert(x, kept)  # a view from before the writes
            stack = self.weight.view(EXPERTS, INNER, HIDDEN)
            total = total + self.expert(x, stack[i[0]])  # a view of the gathered whole
        total = total + self.expert(x, 0.5 * self.weight)  # a stored tensor
        total = total + self.expert(x, self.weight)  # the parameter, as an argument
        return total


def trained(axis: str) -> None:
    torch.manual_seed(0)
    model = Loop()
    serial = copy.deepcopy(model)
    options = {"mesh": {axis: 2}, "inner": "aot_eager"}
    compiled = torch.compile(model, backend="autoshard", options=options)
    x = torch.randn(6, HIDDEN, generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        losses = [compiled(x), serial(x)]
        torch.testing.assert_close(*losses)
        for loss in losses:
            loss.backward()
        model.decays = serial.decays = True
    assert_same(model, serial, 1e-5)


def test_what_eager_code_makes_of_a_parameter_enters_a_compiled_frame(gloo2: GlooPool) -> None:
    gloo2(trained, "dp_shard")


class Returning(nn.Module):
    """Returns a view of its weight, beside what is computed of it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS * 4, HIDDEN))

    def forward(self, x: Tensor, how: str) -> tuple[Tensor, Tensor]:
        views = {
            "itself": lambda: self.weight,
            "view": lambda: self.weight.view(EXPERTS, 4, HIDDEN),
            "data": lambda: self.weight.data[1:3],
        }
        return (x @ self.weight.t()).sum(), views[how]()


def write_to_a_view(axis: str, how: str) -> None:
    compiled = torch.compile(
        Returning(), backend="autoshard", options={"mesh": {axis: 2}, "inner": "aot_eager"}
    )
    x = torch.ones(4, HIDDEN)
    compiled(x, how)[1].sum()  # reading is nothing to anybody
    _, view = compiled(x, how)
    with torch.no_grad():
        view[0].mul_(2.0)
    with pytest.raises(AutoshardError, match="wrote to .*weight"):
        compiled(x, how)


@pytest.mark.parametrize("axis", ["tp", "dp_shard"])
def test_a_write_to_a_view_that_a_frame_returned_is_no_silent_loss(
    gloo2: GlooPool, axis: str
) -> None:
    for how in ("itself", "view", "data"):
        gloo2(write_to_a_view, axis, how)
