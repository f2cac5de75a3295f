"""What `Program.explain()` says of other placements under a memory budget."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import autoshard


class Blocks(nn.Module):
    """Four blocks; the first may be a region of the user's activation checkpointing."""

    def __init__(self, region: bool) -> None:
        super().__init__()
        self.region = region
        self.first = nn.ModuleList(nn.Linear(64, 256) for _ in range(4))
        self.second = nn.ModuleList(nn.Linear(256, 64) for _ in range(4))

    def block(self, i: int, x: torch.Tensor) -> torch.Tensor:
        return x + self.second[i](nn.functional.gelu(self.first[i](x)).sin())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i in range(4):
            again = self.region and i == 0
            x = checkpoint(self.block, i, x, use_reentrant=False) if again else self.block(i, x)
        return x


@pytest.mark.parametrize("region", [False, True])
def test_explain_says_what_is_known_of_other_placements(region: bool) -> None:
    options = {"mesh": {"tp": 2}, "hardware": "h100", "inner": "aot_eager"}
    x = torch.randn(64, 64, 64)
    program = autoshard.trace(Blocks(region), (x,), **options, memory_budget=15_000_000)
    (line,) = (one for one in program.explain().splitlines() if one.startswith("placements on tp"))
    if region:
        assert line.endswith(
            "before what is kept: your regions of activation checkpointing are computed again"
        )
    else:
        assert "together with what is kept: none with any choice in these segments" in line
