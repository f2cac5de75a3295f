"""What the backend costs where there is nothing to shard: one process, beside plain torch.compile.

    python benchmarks/world_one.py [--model vit] [--device cuda] [--steps 20] [--json PATH]

Without options one process is handed to the inner compiler as it is; with `rng="invariant"` asked
for by name the graph goes the whole way of capture, plan and rewriting, to draw what any mesh
draws. Both are measured, a training step with SGD, interleaved, each figure beside its ratio to
torch.compile: the median step, the first step (compilation from empty caches; the order of
compilation rotates over `--rounds`, and the least counts), and the peak of a profiled step. On
CUDA the Llama has layers of a 1B shape, in bf16, and the peak is the allocator's. `predicted` is
what `Program.memory("sgd")` says of the last way, with the parameters; `measured` the same by the
allocator.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._inductor.utils import fresh_cache
from torch.profiler import ProfilerActivity, profile

import autoshard
from data_parallel import held, peak
from step_models import MODELS

WAYS: dict[str, dict[str, Any] | None] = {
    "torch.compile": None,
    "autoshard": {},
    "autoshard rng": {"rng": "invariant"},
}


def compiled(model: nn.Module, options: dict[str, Any] | None) -> Callable[..., Any]:
    if options is None:
        return torch.compile(model)
    return torch.compile(model, backend="autoshard", options=options)


def step(call: Callable[..., Any], model: nn.Module, ids: torch.Tensor) -> float:
    """Seconds of one training step."""
    synchronize(ids)
    start = time.perf_counter()
    call(ids).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=1e-3)
                parameter.grad = None
    synchronize(ids)
    return time.perf_counter() - start


def synchronize(tensor: torch.Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize()


def peak_of(call: Callable[..., Any], model: nn.Module, ids: torch.Tensor) -> int:
    """Bytes above what is held between steps."""
    if ids.is_cuda:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step(call, model, ids)
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        step(call, model, ids)
    return peak(recorded)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="llama")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=1, help="compilations of each")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    with torch.device(args.device):
        model, batch = MODELS[args.model](args.device, args.batch)
    model = model.to(dtype)
    batch = batch.to(dtype) if batch.is_floating_point() else batch
    first: dict[str, list[float]] = {name: [] for name in WAYS}
    calls: dict[str, tuple[Callable[..., Any], nn.Module]] = {}
    names = list(WAYS)
    for turn in range(args.rounds):
        torch.compiler.reset()  # between rounds only: those of the last are measured further
        for name in names[turn % 3 :] + names[: turn % 3]:
            own = copy.deepcopy(model)
            calls[name] = compiled(own, WAYS[name]), own
            with fresh_cache():
                first[name].append(step(*calls[name], batch))
    for call in calls.values():
        for _ in range(3):
            step(*call, batch)
    times: dict[str, list[float]] = {name: [] for name in WAYS}
    for _ in range(args.steps):
        for name, call in calls.items():
            times[name].append(step(*call, batch))
    rows = {
        name: {
            "ms": 1e3 * statistics.median(times[name]),
            "first_s": min(first[name]),
            "peak_mb": peak_of(*call, batch) / 1e6,
        }
        for name, call in calls.items()
    }
    base = rows["torch.compile"]
    print(
        f"{'':16}{'ms a step':>12}{'ratio':>7}{'first s':>10}{'ratio':>7}{'peak MB':>10}"
        f"{'ratio':>7}"
    )
    for name, row in rows.items():
        print(
            f"{name:16}"
            + "".join(
                f"{row[key]:{12 if key == 'ms' else 10}.1f}{row[key] / base[key]:7.2f}"
                for key in ("ms", "first_s", "peak_mb")
            )
        )
    planned, module = list(WAYS)[-1], calls[list(WAYS)[-1]][1]
    measured = rows[planned]["peak_mb"] + held(module) / 1e6
    predicted = autoshard.programs(module)[-1].memory("sgd").peak / 1e6
    print(
        f"peak of {planned!r}, with parameters: predicted {predicted:.1f} MB, measured "
        f"{measured:.1f} MB, ratio {predicted / measured:.2f}"
    )
    rows[planned] |= {"predicted_mb": predicted, "measured_mb": measured}
    if args.json:
        settings = {key: str(value) for key, value in vars(args).items()}
        args.json.write_text(json.dumps({"settings": settings, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
