"""Programs that Inductor alone gets wrong, or refuses: each here beside eager, with gradients."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

# Dynamo's, of what is handed on at a break
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")


@pytest.fixture(autouse=True)
def _compiled_anew() -> Iterator[None]:
    from torch._inductor.utils import fresh_cache

    torch._dynamo.reset()
    with fresh_cache():
        yield


def compiled(model: nn.Module) -> Any:
    """With all passes, which one process is spared unless it asks for them."""
    return torch.compile(model, backend="autoshard", options={"rng": "invariant"})


class Written(nn.Module):
    """A sum over what is scattered late, which Inductor fuses with what is ready early."""

    def forward(self, src: Any, index: Any, early: Any, weight: Any, other: Any) -> Any:
        gate = torch.sigmoid(early.permute(1, 2, 0, 3).reshape(8, 16, 16))
        product = gate.reshape(128, 16) @ other
        written = torch.zeros(2, 2048).scatter_add(1, index, src @ weight)
        return product, written.sum(0).view(8, 16, 16) * gate, gate


def test_a_reader_comes_after_the_write() -> None:
    torch.manual_seed(0)
    index = torch.randint(2048, (2, 4096))
    sizes = ((2, 64), (2, 8, 16, 8), (64, 4096), (16, 16))
    src, early, weight, other = (torch.randn(size) for size in sizes)
    given = (src, index, early, weight, other)
    for ours, right in zip(compiled(Written())(*given), Written()(*given)):
        torch.testing.assert_close(ours, right)


def test_a_convolution_that_is_pooled() -> None:
    """Its results lie by channels, of which backward makes a view that is none."""
    torch.manual_seed(0)
    serial = nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(8 * 4 * 4, 4)),
    )
    model = copy.deepcopy(serial)
    x = torch.randn(2, 3, 16, 16)
    for each in (serial, compiled(model)):
        each(x).pow(2).sum().backward()
    for ours, right in zip(model.parameters(), serial.parameters()):
        torch.testing.assert_close(ours.grad, right.grad)


class Queued(nn.Module):
    """MoCo's queue: forward reads it, or a copy, and writes it behind a graph break."""

    def __init__(self, copied: bool) -> None:
        super().__init__()
        self.copied = copied
        self.query = nn.Linear(16, 12)
        self.register_buffer("queue", torch.randn(12, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query = self.query(x)
        keys = query.detach()
        scores = query @ (self.queue.clone().detach() if self.copied else self.queue)
        torch._dynamo.graph_break()
        with torch.no_grad():
            self.queue[:, : len(x)] = keys.t()
        return scores.sin()


def test_backward_reads_the_copy_that_forward_read() -> None:
    torch.manual_seed(0)
    serial = Queued(copied=True)
    model = copy.deepcopy(serial)
    x = torch.randn(8, 16)
    for each in (serial, compiled(model)):
        each(x).sum().backward()
    torch.testing.assert_close(model.query.weight.grad, serial.query.weight.grad)


def test_a_buffer_written_before_the_backward_that_reads_it_is_an_error() -> None:
    for each in (model := Queued(copied=False), compiled(model)):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            each(torch.randn(8, 16)).sum().backward()


class Returned(nn.Module):
    """The caller gets what a product's derivative reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 12), nn.Parameter(torch.randn(12, 6))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.first(x)
        return hidden, hidden @ self.second


def test_a_result_written_before_the_backward_that_reads_it_is_an_error() -> None:
    for each in (model := Returned(), compiled(model)):
        hidden, result = each(torch.randn(8, 16))
        with torch.no_grad():
            hidden.zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            result.sum().backward()
