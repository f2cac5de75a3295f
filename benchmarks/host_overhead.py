"""What a step costs the host besides the work: microseconds a parameter over plain torch.compile.

    python benchmarks/host_overhead.py [--parameters 300] [--inner inductor] [--json PATH]
    torchrun --nproc-per-node=2 benchmarks/host_overhead.py [--axis dp_shard]

The model is so small that the host's work is the step: `--parameters` vectors of one element, added
up. Forward and backward through torch.compile and through this backend take turns, so that other
load meets both; each figure is the CPU time of the process's main thread, the least of all steps.
At world size 1 this backend adds nothing of its own; at 2 it unwraps the stored parameters, gathers
them, reduces their gradients, wraps these in DTensors, and autograd accumulates those. The loss
does not depend on the other rank; waits of collectives are not CPU time, starting them is.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


class Vectors(nn.Module):
    """Many parameters, hardly any arithmetic; gradients that differ, or they would be one."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.all = nn.ParameterList([nn.Parameter(torch.ones(2)) for _ in range(count)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * sum(p.square().sum() for p in self.all)


def spent(call: Callable[..., Any], model: nn.Module, x: torch.Tensor) -> tuple[float, float]:
    """Seconds of the thread in forward and in backward."""
    model.zero_grad()
    start = time.thread_time()
    loss = call(x)
    middle = time.thread_time()
    loss.backward()
    return middle - start, time.thread_time() - middle


def main() -> None:
    """Run both and print microseconds a parameter on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=int, default=300)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--inner", default="inductor", choices=["inductor", "aot_eager"])
    parser.add_argument("--axis", default="dp_shard", choices=["dp_shard", "dp_replicate"])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    world = int(os.environ.get("WORLD_SIZE", 1))
    plain, sharded = Vectors(args.parameters), Vectors(args.parameters)
    sharded.load_state_dict(copy.deepcopy(plain.state_dict()))
    options = {"mesh": {args.axis: world}, "inner": args.inner}
    calls = {
        "torch.compile": (torch.compile(plain, backend=args.inner), plain),
        "autoshard": (torch.compile(sharded, backend="autoshard", options=options), sharded),
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    x = torch.ones(())
    for step in range(args.steps + 3):
        for name, (call, model) in calls.items():
            found = spent(call, model, x)
            if step >= 3:
                times[name].append(found)
    each = {
        name: [1e6 * min(column) / args.parameters for column in zip(*found)]
        for name, found in times.items()
    }
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(f"world size {world}, {args.inner}, {args.axis}, {args.parameters} parameters:")
        print("microseconds a parameter")
        for name, (forward, backward) in each.items():
            print(f"{name:14} forward {forward:6.2f}  backward {backward:6.2f}")
        over = sum(each["autoshard"]) - sum(each["torch.compile"])
        ratio = sum(each["autoshard"]) / sum(each["torch.compile"])
        print(f"over torch.compile: {over:.2f} us a parameter, ratio {ratio:.2f}")
        if args.json:
            args.json.write_text(json.dumps({"world": world, "us": each, "over": over}) + "\n")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
