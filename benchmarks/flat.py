"""What a rank holds of the operating system and of the store over a long run: it must not grow.

    torchrun --nproc-per-node=2 benchmarks/flat.py [--steps 1500] [--meshes tp cp ...] [--json PATH]

A small Llama trains on each axis of two processes (AdamW, operator by operator), and every tenth of
the steps each rank reads of itself: resident memory, blocks that Python has allocated, objects that
its garbage collector tracks, open descriptors, threads; and the keys of the job's store. The table
has the first reading, that of half the steps and the last, of the rank where more was added; "a
step" is the growth of the second half, divided by its steps: for some 300 steps allocators settle,
as they do with torch.compile and no collective (`--meshes alone`).
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from llama_model import Llama, Shape, WithLoss

SHAPE = Shape(vocab=32, width=16, hidden=32, layers=2, heads=2, length=8)
BATCH = 4
READINGS = 10


def reading() -> dict[str, int]:
    """What this process holds now."""
    gc.collect()
    resident = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "resident KB": resident * os.sysconf("SC_PAGE_SIZE") // 1024,
        "Python blocks": sys.getallocatedblocks(),
        "objects": len(gc.get_objects()),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "store keys": dist.distributed_c10d._get_default_store().num_keys(),
    }


def run(axis: str, steps: int) -> list[dict[str, int]]:
    """Readings of this rank, one behind each tenth of the steps."""
    torch.manual_seed(0)
    model = WithLoss(Llama(SHAPE))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    options = {"mesh": {axis: dist.get_world_size()}, "inner": "aot_eager"}
    if axis == "alone":
        call = torch.compile(model, backend="aot_eager")
    else:
        call = torch.compile(model, backend="autoshard", options=options)
    own = axis == "dp_shard"
    draw = torch.Generator().manual_seed(1 + own * dist.get_rank())
    found = []
    for step in range(1, steps + 1):
        ids = torch.randint(SHAPE.vocab, (BATCH, SHAPE.length), generator=draw)
        call(ids).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % max(1, steps // READINGS) == 0:
            found.append(reading())
    return found


def main() -> None:
    """Train, read and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--meshes", nargs="*", default=["tp", "dp_shard", "pp", "cp"])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rows: dict[str, Any] = {}
    for axis in args.meshes:
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, run(axis, args.steps))
        torch.compiler.reset()
        rows[axis] = ranks
        if dist.get_rank() == 0:
            half = len(ranks[0]) // 2
            between = max(1, (len(ranks[0]) - 1 - half) * (args.steps // READINGS))
            print(f"{axis}={len(ranks)}, {args.steps} steps", flush=True)
            for name in ranks[0][0]:
                most = max(ranks, key=lambda one, name=name: one[-1][name] - one[0][name])
                first, middle, last = (most[at][name] for at in (0, half, -1))
                print(
                    f"  {name:14}{first:10}{middle:10}{last:10}{last / max(1, first):8.3f}"
                    f"{(last - middle) / between:10.4f} a step",
                    flush=True,
                )
    if args.json and dist.get_rank() == 0:
        args.json.write_text(json.dumps(rows, indent=2) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
