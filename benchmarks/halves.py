"""Layers on two halves of the batch beside layers on the whole: milliseconds of a step, on tp=2.

    torchrun --nproc-per-node=2 benchmarks/halves.py [--json PATH]

Contestants take turns; a row a size, with their ratio. On CPUs a collective is computed by the
cores that the products need, so that nothing is spared and the ratio may be above 1: what it shows
there is what two halves cost.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

ROUNDS = 6
CONTESTANTS: dict[str, dict[str, Any]] = {
    "whole": {"overlap_halves": False},
    "halves": {"overlap_halves": True},
}


class Layer(nn.Module):
    """A gated feed-forward behind a norm, with its residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.gate, self.up = (nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        y: torch.Tensor = x + self.down(nn.functional.silu(self.gate(h)) * self.up(h))
        return y


def step_of(width: int, x: torch.Tensor, options: dict[str, Any]) -> Callable[[], None]:
    """One forward and backward of four layers."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer(width) for _ in range(4)))
    settings = {"mesh": {"tp": 2}, "sequence_parallel": False, **options}
    compiled = torch.compile(model, backend="autoshard", options=settings)

    def step() -> None:
        compiled(x).square().mean().backward()
        for parameter in model.parameters():
            parameter.grad = None

    return step


def main() -> None:
    """Time both and print a line a size on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--widths", type=int, nargs="+", default=[128, 512])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    first = dist.get_rank() == 0
    rows = []
    if first:
        print("on CPUs the cores that compute also communicate: above 1 is to be expected")
        print(" width  whole ms  halves ms  ratio")
    for width in args.widths:
        x = torch.randn(4, 128, width, generator=torch.Generator().manual_seed(1))
        steps = {name: step_of(width, x, options) for name, options in CONTESTANTS.items()}
        best = dict.fromkeys(steps, float("inf"))
        for _ in range(ROUNDS):
            for name, step in steps.items():
                step()
                started = time.perf_counter()
                for _ in range(5):
                    step()
                best[name] = min(best[name], 200 * (time.perf_counter() - started))
        rows.append({"width": width, **best})
        if first:
            whole, halves = best.values()
            print(f"{width:6}{whole:10.2f}{halves:11.2f}{halves / whole:7.2f}", flush=True)
    if first and args.json is not None:
        args.json.write_text(json.dumps({"ranks": 2, "rows": rows}, indent=2))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
