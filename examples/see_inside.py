"""Show what one rank runs, without starting a process: the graph before and after, and the plan.

    python examples/see_inside.py

Everything is on the meta device, so a model of any size can be looked at on a laptop.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

import autoshard


class Block(nn.Module):
    """A pre-norm feed-forward block."""

    def __init__(self, width: int = 512) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return y


def main() -> None:
    with torch.device("meta"):
        model, x = Block(), torch.randn(8, 256, 512)
    program = autoshard.trace(model, (x,), mesh={"tp": 4}, planner={"sequence_parallel": False})
    print("before\n")
    print(autoshard.render(program.serial))
    print("\nafter, one of 4 ranks\n")
    print(autoshard.render(program.graph_module))
    print("\n" + program.explain())


if __name__ == "__main__":
    main()
