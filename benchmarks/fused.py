"""Collectives that are one operator with the products beside them: milliseconds of a step, on tp.

    torchrun --nproc-per-node=2 benchmarks/fused.py [--device cuda] [--json PATH]

Contestants take turns; a row a size, with their ratios to layers whose collectives stand alone. On
CPUs a fused operator is the collective and then the products, so that nothing is spared.
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

from data_parallel import start, together

ROUNDS = 6
CONTESTANTS: dict[str, dict[str, Any]] = {
    "alone": {"planner": {"sequence_parallel": False}},
    "sequence parallel": {},
    "fused": {"planner": {"fuse_collectives": True}},
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
    model = nn.Sequential(*(Layer(width) for _ in range(4))).to(x.device, x.dtype)
    settings = {"mesh": {"tp": dist.get_world_size()}, **options}
    compiled = torch.compile(model, backend="autoshard", options=settings)

    def step() -> None:
        compiled(x).square().mean().backward()
        for parameter in model.parameters():
            parameter.grad = None

    return step


def main() -> None:
    """Time them and print a line a size on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--widths", type=int, nargs="+", help="128 512; on CUDA 2048 4096")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device, first = start(args.device), dist.get_rank() == 0
    on_cuda = device.type == "cuda"
    rows = []
    for width in args.widths or ([2048, 4096] if on_cuda else [128, 512]):
        x = torch.randn(4, 2048 if on_cuda else 128, width, device=device)
        x = x.bfloat16() if on_cuda else x
        steps = {name: step_of(width, x, options) for name, options in CONTESTANTS.items()}
        best = dict.fromkeys(steps, float("inf"))
        for _ in range(ROUNDS):
            for name, step in steps.items():
                step()
                together(x)
                started = time.perf_counter()
                for _ in range(5):
                    step()
                together(x)
                best[name] = min(best[name], 200 * (time.perf_counter() - started))
        rows.append({"width": width, **best})
        if first:
            said = [f"{n} {ms:.2f} ms ({ms / best['alone']:.2f})" for n, ms in best.items()]
            print(f"width {width}: {', '.join(said)}", flush=True)
    if first and args.json is not None:
        args.json.write_text(json.dumps({"ranks": dist.get_world_size(), "rows": rows}, indent=2))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
