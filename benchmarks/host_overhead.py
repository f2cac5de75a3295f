"""What a step costs the host besides the work: microseconds a parameter over plain torch.compile.

    python benchmarks/host_overhead.py [--parameters 300] [--inner inductor] [--json PATH]
    torchrun --nproc-per-node=2 benchmarks/host_overhead.py [--axis dp_shard]

The model is so small that the host's work is the step: `--parameters` short vectors, added
up. Forward and backward through torch.compile and through this backend take turns, so that other
load meets both; each figure is the CPU time of the process's main thread, the least of all steps.
At world size 1 this backend adds nothing of its own. At 2 Dynamo guards DTensors, they are
unwrapped, and the gradients are wrapped and stored (`wrap`); what else is over torch.compile is the
graph's own work: filling buckets, taking them apart, starting collectives. `guards` is all of the
forward but the graph and the unwrapping; waiting for a collective is not CPU time.
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

from autoshard import backend
from autoshard.runtime import compat
from autoshard.runtime.parameters import unsharding as unshard_parameter


class Vectors(nn.Module):
    """Many parameters, hardly any arithmetic; gradients that differ, or they would be one.

    A shard fills its place in a bucket (see `passes.buckets`): less would be copied out.
    """

    def __init__(self, count: int) -> None:
        super().__init__()
        self.all = nn.ParameterList([nn.Parameter(torch.ones(256)) for _ in range(count)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * sum(p.square().sum() for p in self.all)


class Parts:
    """CPU seconds of the thread inside named functions, since `clear`."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, counted under `name`."""

        @torch.compiler.disable
        def counted(*args: Any, **kwargs: Any) -> Any:
            start = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[name] = self.seconds.get(name, 0.0) + time.thread_time() - start

        return counted

    def watch(self) -> None:
        """Count what the backend does besides the graph."""
        compile_local = backend.compile_local

        def compiled(*args: Any, **kwargs: Any) -> Any:
            return self.timed("graph", compile_local(*args, **kwargs))

        backend.compile_local = compiled
        backend.unwrap = self.timed("unwrap", backend.unwrap)
        wrap = unshard_parameter._Unwrap.backward
        unshard_parameter._Unwrap.backward = staticmethod(self.timed("wrap", wrap))

    def plain(self, inner: str) -> Callable[..., Any]:
        """torch's own backend `inner`, its graph counted."""
        found = compat.registered_backend(inner)
        return lambda gm, inputs: self.timed("graph", found(gm, inputs))


def spent(
    parts: Parts, call: Callable[..., Any], model: nn.Module, x: torch.Tensor
) -> dict[str, float]:
    """Seconds of the thread in forward and in backward, and in the parts of them."""
    model.zero_grad()
    parts.seconds.clear()
    start = time.thread_time()
    loss = call(x)
    middle = time.thread_time()
    loss.backward()
    found = {"forward": middle - start, "backward": time.thread_time() - middle, **parts.seconds}
    inside = found.get("graph", 0.0) + found.get("unwrap", 0.0)
    return {**found, "guards": found["forward"] - inside}


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
    parts = Parts()
    parts.watch()
    calls = {
        "torch.compile": (torch.compile(plain, backend=parts.plain(args.inner)), plain),
        "autoshard": (torch.compile(sharded, backend="autoshard", options=options), sharded),
    }
    times: dict[str, list[dict[str, float]]] = {name: [] for name in calls}
    x = torch.ones(())
    for step in range(args.steps + 3):
        for name, (call, model) in calls.items():
            found = spent(parts, call, model, x)
            if step >= 3:
                times[name].append(found)
    each = {
        name: {key: 1e6 * min(f[key] for f in found) / args.parameters for key in found[0]}
        for name, found in times.items()
    }
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(f"world size {world}, {args.inner}, {args.axis}, {args.parameters} parameters:")
        print(table(each))
        ours, theirs = each["autoshard"], each["torch.compile"]
        over = {key: ours.get(key, 0.0) - theirs.get(key, 0.0) for key in COLUMNS}
        print(f"over torch.compile: {over['forward'] + over['backward']:.1f} us a parameter, of it")
        print(f"guards, unwrapping and wrapping {sum(over[key] for key in HOST):.1f}")
        if args.json:
            args.json.write_text(json.dumps({"world": world, "us": each, "over": over}) + "\n")
    if dist.is_initialized():
        dist.destroy_process_group()


HOST = ("guards", "unwrap", "wrap")
COLUMNS = ("forward", "backward", *HOST)


def table(each: dict[str, dict[str, float]]) -> str:
    """Microseconds a parameter; forward and backward contain the other columns."""
    lines = [" " * 14 + "".join(f"{key:>10}" for key in COLUMNS) + "   (us a parameter)"]
    for name, row in each.items():
        lines.append(f"{name:14}" + "".join(f"{row.get(key, 0.0):10.2f}" for key in COLUMNS))
    return "\n".join(lines)


if __name__ == "__main__":
    main()
