"""Losses of flattened tokens on cp: what is sent of them, and their values and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autoshard.program import Program
from autoshard.verification.program_check import verify_program
from traced import programs

B, S, V = 2, 256, 128


class Tokens(nn.Module):
    """Labels of the next tokens, shifted and flattened, as Hugging Face's models do."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(V, 16), nn.Linear(16, V, bias=False)
        self.options = options

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.embed(ids)).float()
        labels = F.pad(ids, (0, 1), value=3)[..., 1:].contiguous()
        loss = F.cross_entropy(logits.view(-1, V), labels.view(-1), **self.options)
        return loss.square().mean()


def made(mesh: dict[str, int], **options: Any) -> tuple[Program, float]:
    (program,), values = programs(
        Tokens(**options), (torch.randint(0, V, (B, S)),), [{"mesh": mesh}]
    )
    found = verify_program(program, values)
    return program, found.worst_by_norm[1]


@pytest.mark.parametrize("mesh", [{"cp": 2}, {"cp": 2, "tp": 2}])
@pytest.mark.parametrize(
    "options",
    [
        {"ignore_index": 3},
        {"reduction": "sum", "ignore_index": 3},
        {"label_smoothing": 0.1, "weight": torch.linspace(0.5, 2, V)},
    ],
    ids=["mean", "sum", "smoothed"],
)
def test_logits_are_not_sent(mesh: dict[str, int], options: dict[str, Any]) -> None:
    program, difference = made(mesh, **options)
    assert difference < 1e-5
    logits = 4 * B * S * V // 2
    on_cp = [one for one in program.collectives() if one.axis == "cp"]
    assert max(one.bytes for one in on_cp) < logits / 4, on_cp


def test_a_loss_of_each_token_stays() -> None:
    program, difference = made({"cp": 2}, reduction="none")
    assert difference < 1e-5
    losses = [n for n in program.serial.graph.nodes if "cross_entropy" in n.name]
    assert [n.meta["val"].shape for n in losses] == [(B * S,)]
