"""Data parallelism against torch's own on two gloo processes: step time, and memory held.

    torchrun --nproc-per-node=2 benchmarks/data_parallel.py [--steps 10] [--width 512] [--layers 8]

Compares this backend (DDP, ZeRO-2, ZeRO-3) with DistributedDataParallel and FSDP2's fully_shard,
each eager and under torch.compile, in one run: the contestants take turns step by step, so that
other load on the machine meets all of them. Each row is the median step, its ratio to
autoshard's ZeRO-3 and DDP, and the bytes of parameters and gradients a rank holds after backward.
Peak memory within the step and bytes on the wire are not measured.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel


class Block(nn.Module):
    """Norm, two linears and a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """A stack of blocks and the mean square of its output."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[Block(width) for _ in range(layers)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x).square().mean()


Contestant = tuple[nn.Module, Callable[..., Any]]


def contestants(model: nn.Module, bucket_bytes: int) -> dict[str, Contestant]:
    """(the module whose parameters are trained, what is called) by name."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp_shard",))

    def ours(mesh_sizes: dict[str, int], zero: int) -> Contestant:
        own = copy.deepcopy(model)
        options = {"mesh": mesh_sizes, "zero": zero, "bucket_bytes": bucket_bytes}
        return own, torch.compile(own, backend="autoshard", options=options)

    def ddp() -> nn.Module:
        return DistributedDataParallel(copy.deepcopy(model))

    def fsdp() -> nn.Module:
        own = copy.deepcopy(model)
        for block in own.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(own, mesh=mesh)
        return own

    n = dist.get_world_size()
    found = {
        "autoshard ddp": ours({"dp_replicate": n}, 3),
        "autoshard zero-2": ours({"dp_shard": n}, 2),
        "autoshard zero-3": ours({"dp_shard": n}, 3),
    }
    for name, make in (("DDP", ddp), ("FSDP2", fsdp)):
        eager, compiled = make(), make()
        found[f"{name} eager"] = (eager, eager)
        found[f"{name} compiled"] = (compiled, torch.compile(compiled))
    return found


def held(module: nn.Module) -> int:
    """Bytes of parameters and gradients a rank holds after backward."""
    tensors = [t for p in module.parameters() for t in (p, p.grad) if t is not None]
    local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    return sum(t.numel() * t.element_size() for t in local)


def main() -> None:
    """Run all contestants and print the table on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--bucket-bytes", type=int, default=16 << 20)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    found = contestants(Model(args.width, args.layers), args.bucket_bytes)
    seconds: dict[str, list[float]] = {name: [] for name in found}
    memory: dict[str, int] = {}
    optimizers: dict[str, torch.optim.Optimizer] = {}
    for step in range(args.steps + 2):
        x = torch.randn(args.batch, args.width)
        for name, (module, call) in found.items():
            dist.barrier()
            start = time.perf_counter()
            call(x).backward()
            memory[name] = held(module)
            if name not in optimizers:
                optimizers[name] = torch.optim.SGD(module.parameters(), lr=1e-3)
            optimizers[name].step()
            optimizers[name].zero_grad()
            dist.barrier()
            if step >= 2:  # two steps to compile and to settle
                seconds[name].append(time.perf_counter() - start)
    if dist.get_rank() == 0:
        print(f"{'':18} {'ms a step':>10} {'to zero-3':>10} {'to ddp':>8} {'MB held':>8}")
        median = {name: statistics.median(times) for name, times in seconds.items()}
        for name, value in median.items():
            print(
                f"{name:18} {1e3 * value:10.1f} {value / median['autoshard zero-3']:10.2f} "
                f"{value / median['autoshard ddp']:8.2f} {memory[name] / 1e6:8.1f}"
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
