"""Data-parallel ranks that take other branches: they train as under DDP, or all of them raise."""

from __future__ import annotations

import copy
import os
from typing import Any

import pytest
import torch
from torch import nn

from autoshard.verification.comparison import furthest

Batch = tuple[torch.Tensor, torch.Tensor | None]


class Pictured(nn.Module):
    """Text with or without an image: what an image is read by has a size of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.image = nn.Linear(6, 5), nn.Linear(5, 8)
        self.text, self.head, self.never = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(2, 2)
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor, image: torch.Tensor | None = None) -> torch.Tensor:
        x = self.text(x)
        if image is not None:
            x = x + self.image(torch.tanh(self.frozen(image)))
        return self.head(torch.tanh(x)).square().mean()


class InParts(nn.Module):
    """The same, in modules that are compiled one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.whole = Pictured()

    def forward(self, x: torch.Tensor, image: torch.Tensor | None = None) -> torch.Tensor:
        parts = self.whole
        x = parts.text(x)
        if image is not None:
            x = x + parts.image(torch.tanh(parts.frozen(image)))
        return parts.head(torch.tanh(x)).square().mean()


WITH_IMAGE = [((True, False),), ((True, True),), ((False, False),), ((False, True), (True, False))]
"""Of each microbatch of each step, whether a rank's batch has an image."""


def batch_of(step: int, micro: int, rank: int, image: bool) -> Batch:
    drawn = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
    x, picture = torch.randn(3, 8, generator=drawn), torch.randn(3, 6, generator=drawn)
    return x, picture if image else None


def trained(cls: type[nn.Module], mesh: dict[str, int], inner: str) -> Any:
    """The largest difference from the serial model's parameters after each step; the error of the
    step that raised one."""
    torch.compiler.reset()
    torch.manual_seed(0)
    rank = int(os.environ["RANK"])
    serial = cls()
    model: Any = copy.deepcopy(serial)
    options = {"mesh": mesh, "inner": inner, "timeout": 60}
    if cls is Pictured:
        model = torch.compile(model, backend="autoshard", options=options)
    else:
        for part in ("text", "frozen", "image", "head"):
            getattr(model.whole, part).compile(backend="autoshard", options=options)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5, momentum=0.9) for m in (model, serial)]
    off = []
    for step, micros in enumerate(WITH_IMAGE):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for micro, images in enumerate(micros):
            try:
                model(*batch_of(step, micro, rank, images[rank])).backward()
            except Exception as error:
                return off, str(error)
            for each, image in enumerate(images):
                (serial(*batch_of(step, micro, each, image)) / 2).backward()
        for module, optimizer in zip((model, serial), optimizers, strict=True):
            nn.utils.clip_grad_norm_(module.parameters(), 0.5)
            optimizer.step()
        with torch.no_grad():  # each rank evaluates as many batches as it has
            for micro in range(rank if "dp_replicate" in mesh else 0):
                model(*batch_of(9, micro, rank, True))
            pairs = zip(model.parameters(), serial.parameters(), strict=True)
            off.append(furthest(float((_whole(p) - q).abs().max()) for p, q in pairs))
    return off, ""


def _whole(p: Any) -> torch.Tensor:
    return p.full_tensor() if hasattr(p, "full_tensor") else p


@pytest.mark.parametrize(("cls", "inner"), [(Pictured, "eager"), (InParts, "aot_eager")])
def test_a_rank_without_an_image_trains(gloo2: Any, cls: type[nn.Module], inner: str) -> None:
    for off, error in gloo2(trained, cls, {"dp_replicate": 2}, inner):
        assert not error, error
        assert len(off) == len(WITH_IMAGE) and all(each < 1e-6 for each in off)
