"""One rank of a world of eight on one device: predicted seconds and bytes beside measured ones.

    python benchmarks/rank_of_many.py [--device cuda] [--steps 10] [--json PATH]

The first rank of each mesh runs its program in a world whose other ranks are not there: collectives
return at once, with its own part in the place of theirs, so that numbers mean nothing and what is
timed is what the rank computes. `compute` is the median of forward and backward; predicted is what
`autoshard plan` says of the built-in machine of this name, without communication. `peak` is the
most bytes that such a step holds, parameters and gradients included (the allocator's, on CUDA,
which does not see what CUDA graphs hold); predicted is `Program.memory("sgd")`. On CUDA the model
has layers of the width of Llama 70B, in bfloat16. A peak above its prediction by more than a tenth
is a failure, and the exit status says so.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import autoshard
from autoshard.mesh_search import search_meshes
from data_parallel import held
from llama_model import Llama, Shape, WithLoss
from world_one import peak_of, synchronize

WORLD = 8
SHAPES = {
    "cpu": Shape(vocab=2048, width=256, hidden=768, layers=2, heads=8, length=128),
    "cuda": Shape(vocab=32_000, width=8192, hidden=28_672, layers=2, heads=64, length=4096),
}
FLOAT8: dict[str, Any] = {"precision": {"matmul": "float8"}}
ROWS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "tp": ({"tp": 8}, {}),
    "tp, no sp": ({"tp": 8}, {"planner": {"sequence_parallel": False}}),
    "tp, float8": ({"tp": 8}, FLOAT8),
    "tp, CUDA graphs": ({"tp": 8}, {"cuda_graphs": True}),
    "dp_shard": ({"dp_shard": 8}, {}),
    "dp_shard x tp": ({"dp_shard": 4, "tp": 2}, {}),
    "cp": ({"cp": 8}, {}),
}
"""What is measured: the mesh, and other options. Those of CUDA are left out on a CPU."""
SLACK = 1.1
"""A measured peak over its prediction: the allocator rounds, and libraries take room to work in."""


def median_step(call: Any, model: torch.nn.Module, ids: torch.Tensor, steps: int) -> float:
    """Seconds of forward and backward, after two that compile and settle."""
    times = []
    for i in range(steps + 2):
        synchronize(ids)
        start = time.perf_counter()
        call(ids).backward()
        synchronize(ids)
        if i > 1:
            times.append(time.perf_counter() - start)
        model.zero_grad(set_to_none=True)
    return statistics.median(times)


def row(mesh: dict[str, int], options: dict[str, Any], device: str, steps: int) -> dict[str, float]:
    """Figures of one mesh: milliseconds and megabytes."""
    torch.manual_seed(0)
    torch.compiler.reset()
    gc.collect()
    shape = SHAPES[device]
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    with torch.device(device):
        model = WithLoss(Llama(shape)).to(dtype)
        ids = torch.randint(shape.vocab, (1, shape.length))
    call = torch.compile(model, backend="autoshard", options={"mesh": mesh, **options})
    seconds = median_step(call, model, ids, steps)
    measured = held(model) + peak_of(call, model, ids)
    program = autoshard.programs(model)[-1]
    with torch.device("meta"):
        planned = WithLoss(Llama(shape)).to(dtype)
        batch = torch.zeros(1, shape.length, dtype=torch.long)
    machine = autoshard.planning.cost.cluster_of(device)
    asked = {key: value for key, value in options.items() if key != "cuda_graphs"}
    found = search_meshes(planned, (batch,), world=WORLD, hardware=machine, mesh=mesh, **asked)
    return {
        "compute_ms": 1e3 * seconds,
        "predicted_ms": 1e3 * found.rows[0].timing.compute,
        "peak_mb": measured / 1e6,
        "predicted_mb": program.memory("sgd").peak / 1e6,
    }


def main() -> int:
    """Measure and print a line a mesh; how many failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    print(f"{'':16}{'compute ms':>11}{'predicted':>10}{'ratio':>7}{'peak MB':>10}", end="")
    print(f"{'predicted':>10}{'ratio':>7}")
    rows: dict[str, Any] = {}
    failed = 0
    for name, (mesh, options) in ROWS.items():
        if args.device == "cpu" and options.keys() & {"precision", "cuda_graphs"}:
            continue
        try:
            one = rows[name] = row(mesh, options, args.device, args.steps)
        except (autoshard.AutoshardError, RuntimeError) as error:
            rows[name] = {"failed": "".join(traceback.format_exception(error))}
            print(f"{name:16} failed: {str(error).splitlines()[0]}\n{rows[name]['failed']}")
            failed += 1
            continue
        over = one["peak_mb"] > SLACK * one["predicted_mb"]
        failed += over
        print(
            f"{name:16}{one['compute_ms']:11.1f}{one['predicted_ms']:10.1f}"
            f"{one['predicted_ms'] / one['compute_ms']:7.2f}{one['peak_mb']:10.0f}"
            f"{one['predicted_mb']:10.0f}{one['predicted_mb'] / one['peak_mb']:7.2f}"
            f"{'  ABOVE ITS PREDICTION' if over else ''}",
            flush=True,
        )
        if args.json:
            args.json.write_text(json.dumps(rows, indent=2) + "\n")
    dist.destroy_process_group()
    return failed


if __name__ == "__main__":
    raise SystemExit(main())
