"""Sums of small tensors over the ranks: gloo's all-reduce beside an all-gather and a local sum.

    torchrun --nproc-per-node=2 benchmarks/small_sums.py [--json PATH]

Microseconds of each for a rank's part of so many KiB, the best of rounds that take turns, and their
ratio: where it is less than 1, `passes/all_reduce_by_all_gather.py` should do the sum so.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from autoshard.runtime.collectives import Axis, all_gather, all_reduce

ROUNDS, CALLS = 6, 40


def main() -> None:
    """Time both and print a line a size on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kib", type=int, nargs="+", default=[4, 32, 64, 128, 256, 1024, 4096])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    n, rank = dist.get_world_size(), dist.get_rank()
    group = dist.group.WORLD
    assert group is not None
    axis = Axis("tp", n, rank, group.group_name)
    rows = []
    if rank == 0:
        print(f"{n} ranks\n   KiB  all-reduce us  gather and sum us  ratio")
    for kib in args.kib:
        x = torch.ones(kib * 256)
        ways: dict[str, Callable[[], torch.Tensor]] = {
            "all_reduce": lambda x=x: all_reduce(x, "sum", axis),
            "gather_and_sum": lambda x=x: all_gather(x[None], axis).sum(0),
        }
        best = dict.fromkeys(ways, float("inf"))
        for _ in range(ROUNDS):
            for name, way in ways.items():
                way()
                started = time.perf_counter()
                for _ in range(CALLS):
                    way()
                best[name] = min(best[name], 1e6 * (time.perf_counter() - started) / CALLS)
        rows.append({"kib": kib, **best})
        if rank == 0:
            one, other = best.values()
            print(f"{kib:6}{one:15.0f}{other:19.0f}{other / one:7.2f}", flush=True)
    if rank == 0 and args.json is not None:
        args.json.write_text(json.dumps({"ranks": n, "rows": rows}, indent=2))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
