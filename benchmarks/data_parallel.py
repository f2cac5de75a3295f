"""Data parallelism against torch's own on two processes: time, peak memory, bytes sent.

    torchrun --nproc-per-node=2 benchmarks/data_parallel.py [--device cuda] [--json PATH]

This backend (DDP, ZeRO-1, 2 and 3) beside DistributedDataParallel and FSDP2's fully_shard, each
eager and under torch.compile, in one run. The contestants take turns step by step, so that other
load on the machine meets all of them. A row is the median over steps, and each column is followed
by its ratio to the best of torch's of the same kind: DDP for what stores whole parameters, FSDP2
for ZeRO-3, and FSDP2 with reshard_after_forward=False for ZeRO-1 and 2, which like it keep gathered
parameters from the forward to the backward.

How each is measured, the same for all and through compiled code as well:
- step: forward, backward, optimizer, zero_grad, between two barriers; the slower rank counts.
- peak: what is held between steps (parameters, DDP's buckets), and above that the allocations of
  a step of its own under torch.profiler, which sees each of them. What the process group's threads
  allocate for themselves is not seen.
- sent: what the kernel says the process sent over its sockets (TCP_INFO), in one step. Linux only.
On CUDA the process group is NCCL's, the peak the allocator's, and what is sent is not seen.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import os
import socket
import stat
import statistics
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

# All contestants are one class, and Dynamo keeps 8 variants of a function: more would run eagerly.
torch._dynamo.config.recompile_limit = 64

CPU = torch.device("cpu")
SETTLING = 3  # steps to compile and to settle; the last is the profiled one


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


class Contestant(NamedTuple):
    """module: whose parameters are trained. call: what is called. rival: whom it is measured by."""

    module: nn.Module
    call: Callable[..., Any]
    rival: str


def start(device: str) -> torch.device:
    """This rank's device, with the process group that its collectives need."""
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return torch.device(device, torch.cuda.current_device()) if device == "cuda" else CPU


def contestants(model: Model, bucket_bytes: int | None) -> dict[str, Contestant]:
    """All of them by name, each with a copy of the model. bucket_bytes: of this backend and of DDP;
    None: the default of each. FSDP2 gathers and reduces block by block."""
    n, device = dist.get_world_size(), next(model.parameters()).device.type
    mesh = init_device_mesh(device, (n,), mesh_dim_names=("dp_shard",))

    def ours(mesh_sizes: dict[str, int], zero: int, rival: str) -> Contestant:
        own = copy.deepcopy(model)
        options = {"mesh": mesh_sizes, "zero": zero, "planner": {"bucket_bytes": bucket_bytes}}
        return Contestant(own, torch.compile(own, backend="autoshard", options=options), rival)

    def ddp() -> nn.Module:
        size = None if bucket_bytes is None else bucket_bytes >> 20
        return DistributedDataParallel(copy.deepcopy(model), bucket_cap_mb=size)

    def fsdp(reshard: bool) -> nn.Module:
        own = copy.deepcopy(model)
        for block in own.blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
        fully_shard(own, mesh=mesh, reshard_after_forward=reshard)
        return own

    found = {
        "autoshard DDP": ours({"dp_replicate": n}, 3, "DDP"),
        "autoshard ZeRO-1": ours({"dp_shard": n}, 1, "FSDP2 kept"),
        "autoshard ZeRO-2": ours({"dp_shard": n}, 2, "FSDP2 kept"),
        "autoshard ZeRO-3": ours({"dp_shard": n}, 3, "FSDP2"),
    }
    rivals = {"DDP": ddp, "FSDP2": lambda: fsdp(True), "FSDP2 kept": lambda: fsdp(False)}
    for name, make in rivals.items():
        eager, compiled = make(), make()
        found[f"{name} eager"] = Contestant(eager, eager, name)
        found[f"{name} compiled"] = Contestant(compiled, torch.compile(compiled), name)
    return found


def sockets() -> Iterator[socket.socket]:
    """The TCP sockets of this process."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                with socket.socket(fileno=os.dup(int(name))) as one:
                    if one.type == socket.SOCK_STREAM and one.family != socket.AF_UNIX:
                        yield one


def bytes_sent() -> int:
    """What this process has sent so far: `tcpi_bytes_sent` of linux/tcp.h, of each socket."""
    infos = (one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256) for one in sockets())
    return sum(struct.unpack_from("Q", info, 200)[0] for info in infos if len(info) >= 208)


def peak(recorded: Any) -> int:
    """Bytes above the start at the highest point of a profiled stretch."""
    events = recorded.profiler.kineto_results.events()
    changes = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
    now = highest = 0
    for _, nbytes in sorted(changes, key=lambda change: change[0]):
        now += nbytes
        highest = max(highest, now)
    return highest


def held(module: nn.Module) -> int:
    """Bytes a rank holds between steps: its parts of the parameters, and DDP's buckets, which are
    as large as the gradients and live as long as the module."""
    local = [p.to_local() if isinstance(p, DTensor) else p for p in module.parameters()]
    nbytes = sum(p.numel() * p.element_size() for p in local)
    return 2 * nbytes if isinstance(module, DistributedDataParallel) else nbytes


class Measured:
    """One contestant's optimizer and figures."""

    def __init__(self, contestant: Contestant) -> None:
        self.contestant = contestant
        self.optimizer: torch.optim.Optimizer | None = None
        self.seconds: list[float] = []
        self.peak = self.sent = 0

    def step(self, x: torch.Tensor) -> None:
        """One training step."""
        self.contestant.call(x).backward()
        if self.optimizer is None:
            self.optimizer = torch.optim.SGD(self.contestant.module.parameters(), lr=1e-3)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def turn(self, number: int, x: torch.Tensor) -> None:
        """Step `number` of the run: the first to settle, then the profiled one, then timed ones."""
        if number < SETTLING - 1:
            self.step(x)
        elif number == SETTLING - 1:
            self.profiled(x)
        else:
            self.timed(x)

    def timed(self, x: torch.Tensor) -> None:
        """A step on the clock."""
        together(x)
        start = time.perf_counter()
        self.step(x)
        together(x)
        self.seconds.append(time.perf_counter() - start)

    def profiled(self, x: torch.Tensor) -> None:
        """A step for its memory and its bytes."""
        together(x)
        if x.is_cuda:
            torch.cuda.reset_peak_memory_stats()
            allocated = torch.cuda.memory_allocated()
            self.step(x)
            risen = torch.cuda.max_memory_allocated() - allocated
            self.peak = held(self.contestant.module) + risen
            return
        before = bytes_sent()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
            self.step(x)
        self.sent = bytes_sent() - before
        self.peak = held(self.contestant.module) + peak(recorded)
        dist.barrier()


def together(x: torch.Tensor) -> None:
    """All ranks have done what they were asked to, their devices too."""
    if x.is_cuda:
        torch.cuda.synchronize()
    dist.barrier()


def race(measured: dict[str, Measured], steps: int, make_batch: Callable[[], torch.Tensor]) -> None:
    """Let the contestants settle, then take `steps` timed turns, each on the same batch."""
    for number in range(SETTLING + steps):
        batch = make_batch()
        for one in measured.values():
            one.turn(number, batch)


def figures(measured: dict[str, Measured]) -> dict[str, dict[str, float]]:
    """Per contestant: the figures, and each as a ratio to the best rival's."""
    rows: dict[str, dict[str, float]] = {}
    for name, one in measured.items():
        device = next(one.contestant.module.parameters()).device
        slowest = torch.tensor(one.seconds, device=device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        rows[name] = {
            "ms": 1e3 * statistics.median(slowest.tolist()),
            "peak_mb": one.peak / 1e6,
            "sent_mb": one.sent / 1e6,
        }
    for name, row in rows.items():
        rival = measured[name].contestant.rival
        for key in ("ms", "peak_mb", "sent_mb"):
            kinds = [f"{rival} {kind}" for kind in ("eager", "compiled", "async")]
            best = min((rows[kind][key] for kind in kinds if kind in rows), default=row[key])
            row[f"{key}_ratio"] = row[key] / best if best else 1.0
    return rows


def table(rows: dict[str, dict[str, float]]) -> str:
    """The figures, each followed by its ratio."""
    lines = [
        f"{'':18}{'ms a step':>12}{'ratio':>7}{'peak MB':>10}{'ratio':>7}"
        f"{'sent MB':>10}{'ratio':>7}"
    ]
    for name, row in rows.items():
        lines.append(
            f"{name:18}{row['ms']:12.1f}{row['ms_ratio']:7.2f}{row['peak_mb']:10.1f}"
            f"{row['peak_mb_ratio']:7.2f}{row['sent_mb']:10.1f}{row['sent_mb_ratio']:7.2f}"
        )
    return "\n".join(lines)


def report(rows: dict[str, dict[str, float]], args: argparse.Namespace) -> None:
    """Print the table; write it and the settings to `args.json` where that is given."""
    print(table(rows))
    if args.json:
        settings = {key: str(value) for key, value in vars(args).items()}
        args.json.write_text(json.dumps({"settings": settings, "rows": rows}, indent=2) + "\n")


def main() -> None:
    """Run all contestants and print the table on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--bucket-bytes", type=int, help="else the defaults")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device = start(args.device)
    found = contestants(Model(args.width, args.layers).to(device), args.bucket_bytes)
    measured = {name: Measured(one) for name, one in found.items()}
    race(measured, args.steps, lambda: torch.randn(args.batch, args.width, device=device))
    rows = figures(measured)
    if dist.get_rank() == 0:
        report(rows, args)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
