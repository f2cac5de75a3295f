"""An optimizer's step on two ranks: `autoshard.optimizer` beside FSDP2's parameters.

    torchrun --nproc-per-node=2 benchmarks/optimizer.py [--parameters 300] [--json PATH]

AdamW on short vectors, so that the host's work is the step: microseconds of its thread a parameter.
Rows are split as this backend stores them (`stored`: stepped by torch's own optimizer) and as
fully_shard does. Contestants take turns in one run, on the same gradients; each figure is a median,
`ratio` is against FSDP2 with the same kernels. Parameters that are not equal in the end, bit for
bit, are a failure, and the exit status says so.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import autoshard
from autoshard.runtime.parameters.eager.stored_tensor import as_parameter, as_stored

KERNELS: dict[str, dict[str, Any]] = {"foreach": {"foreach": True}, "fused": {"fused": True}}


def parameters_of(
    mesh: DeviceMesh, shapes: Sequence[tuple[int, ...]], ours: bool
) -> list[nn.Parameter]:
    """Drawn parameters and gradients, rows split over two ranks, as this backend stores them or as
    fully_shard does."""
    generator = torch.Generator().manual_seed(0)

    def part(shape: tuple[int, ...]) -> DTensor:
        whole = torch.randn(shape, generator=generator)
        local = whole.chunk(2)[mesh.get_local_rank()].clone()
        return DTensor.from_local(local, mesh, [Shard(0)], run_check=False)

    made = []
    for shape in shapes:
        value, gradient = part(shape), part(shape)
        if ours:
            made.append(as_parameter(as_stored(value), True))
            made[-1].grad = as_stored(gradient)
        else:
            made.append(nn.Parameter(value))
            made[-1].grad = gradient
    return made


def measured(
    contestants: dict[str, torch.optim.Optimizer], clock: Callable[[], float], steps: int
) -> dict[str, float]:
    """Seconds of a step of each, which take turns."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(steps):
        for name, optimizer in contestants.items():
            dist.barrier()
            started = clock()
            optimizer.step()
            seconds[name].append(clock() - started)
    return {name: statistics.median(found[3:]) for name, found in seconds.items()}


def wholes(parameters: list[nn.Parameter]) -> list[torch.Tensor]:
    """The parameters' values."""
    return [p.detach().full_tensor() for p in parameters]  # type: ignore[operator]


def adamw(mesh: DeviceMesh, count: int, steps: int) -> dict[str, Any]:
    """Host seconds of AdamW's step, and whether all contestants have the same parameters then."""
    parameters, optimizers = {}, {}
    for kernels, settings in KERNELS.items():
        for name in ("FSDP2", "stored", "optimizer"):
            key = f"{name} {kernels}"
            parameters[key] = parameters_of(mesh, [(256,)] * count, name != "FSDP2")
            made = torch.optim.AdamW(parameters[key], lr=1e-3, **settings)
            optimizers[key] = autoshard.optimizer(made) if name == "optimizer" else made
    seconds = measured(optimizers, time.thread_time, steps)
    found = {name: wholes(held) for name, held in parameters.items()}
    same = all(
        all(map(torch.equal, found[name], found[f"FSDP2 {name.split()[1]}"])) for name in found
    )
    rows = {
        name: {
            "us_a_parameter": 1e6 * value / count,
            "ratio": value / seconds[f"FSDP2 {name.split()[1]}"],
        }
        for name, value in seconds.items()
    }
    return {"rows": rows, "same": same}


def main() -> int:
    """Measure, print on rank 0; 1 where numbers differ."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=int, default=300)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
    found = {"adamw": adamw(mesh, args.parameters, args.steps)}
    if dist.get_rank() == 0:
        for name, row in found["adamw"]["rows"].items():
            print(f"AdamW {name:18}{row['us_a_parameter']:8.2f} us a parameter{row['ratio']:7.2f}")
        print(f"the same parameters: {found['adamw']['same']}")
        if args.json:
            args.json.write_text(json.dumps(found, indent=1))
    failed = not all(part["same"] for part in found.values())
    dist.destroy_process_group()
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
