"""Logits whose last rows are cut off, on cp: what is sent, and values and gradients of the loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autoshard.verification.program_check import verify_program
from traced import programs

B, S, V = 2, 256, 128


class Cut(nn.Module):
    """A loss of the next tokens that cuts the last row off its logits, as many models do."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(V, 16), nn.Linear(16, V, bias=False)
        self.options = options

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.embed(ids))[..., :-1, :].contiguous().float()
        labels = ids[..., 1:].contiguous()
        return F.cross_entropy(logits.view(-1, V), labels.view(-1), **self.options)


@pytest.mark.parametrize("batch", [1, B])
@pytest.mark.parametrize(
    "options",
    [{}, {"reduction": "sum", "ignore_index": 3}, {"label_smoothing": 0.1}],
    ids=["mean", "sum", "smoothed"],
)
def test_rows_that_are_cut_off_logits_are_labels_that_are_ignored(
    options: dict[str, Any], batch: int
) -> None:
    (program,), values = programs(
        Cut(**options), (torch.randint(0, V, (batch, S)),), [{"mesh": {"cp": 2}}]
    )
    found = verify_program(program, values)
    assert found.worst_by_norm[1] < 1e-5
    logits = 4 * S * V
    assert max(one.bytes for one in program.collectives()) < logits / 4
