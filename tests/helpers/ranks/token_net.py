"""A small model of token ids whose parameters have every shape that precision cares about."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Net(nn.Module):
    """Token ids in, so that no floating input needs a cast; an uneven dim; a loss in fp32."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(24, 16)
        self.up = nn.Linear(16, 33)
        self.norm = nn.LayerNorm(33)
        self.head = nn.Linear(33, 24, bias=False)
        self.register_buffer("scale", torch.ones(()))
        self.frozen = nn.Parameter(torch.randn(16), requires_grad=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.norm(torch.relu(self.up(self.embed(ids) * self.frozen)))
        return F.cross_entropy(self.head(x).float().flatten(0, 1), ids.flatten()) * self.scale


def batch(step: int, rows: int = 4) -> torch.Tensor:
    return torch.randint(24, (rows, 6), generator=torch.Generator().manual_seed(step))
