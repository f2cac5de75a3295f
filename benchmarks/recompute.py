"""Step time at one peak of memory: recomputation planned here, torch's budget, full checkpointing.

    python benchmarks/recompute.py [--model llama] [--inner inductor] [--json FILE]

One process, AdamW. First each layer of the model is checkpointed, as users do, and the peak of that
step is measured; it is the budget of the planned run, and torch's `activation_memory_budget` is
lowered until its step holds no more. Peaks are of tensors alive (live_storages.py). Steps are timed
in turns in this one run, and told as ratios of the step that recomputes nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from live_storages import LiveStorages, measure_step
from memory import MODELS

Step = Callable[[], Any]


def made(
    args: argparse.Namespace, layers_checkpointed: bool, share: float, **options: Any
) -> tuple[dict[str, int], Step]:
    """The bytes of a step of one way to run the model, and the step. share: torch's budget."""
    from torch._functorch import config

    torch.compiler.reset()
    torch.manual_seed(0)
    live = LiveStorages()
    model = MODELS[args.model](args.width, args.layers, args.vocab).train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    if layers_checkpointed:
        model.activation_checkpointing_enable()
    ids = torch.randint(args.vocab, (args.batch, args.sequence))
    settings = {"mesh": {"tp": 1}, "inner": args.inner, "rng": "invariant", **options}
    optimizer = torch.optim.AdamW(model.parameters())
    compiled: Any = torch.compile(model, backend="autoshard", options=settings)
    try:
        with config.patch(activation_memory_budget=share):
            found = measure_step(
                live, model, lambda: compiled(input_ids=ids, labels=ids).loss, optimizer
            )
    finally:
        live.restore()

    def step() -> None:
        compiled(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return found, step


def within(args: argparse.Namespace, peak: int) -> tuple[float, dict[str, int], Step]:
    """torch's largest budget, by tenths, with which a step stays below `peak`."""
    for tenths in range(9, -1, -1):
        with contextlib.suppress(RuntimeError):
            found, step = made(args, False, tenths / 10)
            if found["peak"] <= peak or not tenths:
                return tenths / 10, found, step
    raise AssertionError("torch's partitioner split the graph for no budget")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="llama", choices=list(MODELS))
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=256)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--inner", default="aot_eager", choices=["aot_eager", "inductor"])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    runs = {"nothing recomputed": made(args, False, 1.0), "each layer": made(args, True, 1.0)}
    # The planner leaves as much free: under Inductor for what it counts without having seen.
    free_part = 1.1 if args.inner == "inductor" else 1.002
    budget = int(runs["each layer"][0]["peak"] * free_part)
    runs["memory_budget"] = made(args, False, 1.0, memory={"budget": budget})
    share, *theirs = within(args, budget)
    runs[f"torch's budget {share}"] = (theirs[0], theirs[1])
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(args.steps):
        for name, (_, step) in runs.items():
            start = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - start)
    best = {name: min(times) for name, times in seconds.items()}
    free = best["nothing recomputed"]
    rows = []
    print(f"{'':24} {'peak MB':>8} {'of free':>8} {'step':>6}")
    for name, (found, _) in runs.items():
        part = found["peak"] / runs["nothing recomputed"][0]["peak"]
        rows.append({"name": name, "peak": found["peak"], "seconds": best[name]})
        print(f"{name:24} {found['peak'] / 1e6:8.2f} {part:8.2f} {best[name] / free:6.2f}")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
