"""A training step whose loss goes by chunks of rows beside the one of whole logits: time and peak.

    python benchmarks/chunked_loss.py [--vocab 32768] [--width 256] [--rows 4096] [--device cuda]

A Llama of two layers in one process, both ways with rng="invariant", so that both are built alike;
interleaved. time: the median step of SGD. peak: the most bytes a step holds above what is held
between steps, scratch space inside of operators included; predicted: what `Program.memory("sgd")`
says of it. Ratios are to whole logits. The losses of both must be equal to 1e-5: more is a failure,
and the exit status says so. Then what `autoshard plan` predicts of four layers on an H100, of 8192
tokens of 128,256 words in bfloat16: ratios of what a rank holds and of the time of a step.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
from pathlib import Path
from typing import Any

import torch

import autoshard
from autoshard.mesh_search import search_meshes
from llama_model import Llama, Shape, WithLoss
from world_one import peak_of, step

WAYS: dict[str, dict[str, Any]] = {
    "whole": {"rng": "invariant", "memory": {"chunk_loss": False}},
    "chunked": {"rng": "invariant", "memory": {"chunk_loss": True}},
}
STEPS, CLOSE = 3, 1e-5
PLANNED = (2048, 4096)
"""Widths of the models that are only planned."""


def measured(shape: Shape, device: str, inner: str) -> dict[str, dict[str, float]]:
    """Both ways' figures with one inner compiler."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = WithLoss(Llama(shape)).to(device, dtype)
    ids = torch.randint(0, shape.vocab, (1, shape.length), device=device)
    calls, rows = {}, {}
    for name, options in WAYS.items():
        asked = {**options, "inner": inner, "mesh": {"tp": 1}}
        torch.compiler.reset()
        memory = autoshard.trace(model, (ids,), **asked).memory("sgd")
        own = copy.deepcopy(model)
        calls[name] = torch.compile(own, backend="autoshard", options=asked), own
        rows[name] = {"predicted": float(memory.peak - memory.parameters - memory.buffers)}
    torch.compiler.reset()
    for name, (call, own) in calls.items():
        rows[name]["loss"] = float(call(ids).detach())
        step(call, own, ids)
    times: dict[str, list[float]] = {name: [] for name in WAYS}
    for _ in range(STEPS):
        for name, call in calls.items():
            times[name].append(step(*call, ids))
    for name, call in calls.items():
        rows[name] |= {"time": statistics.median(times[name]), "peak": float(peak_of(*call, ids))}
    return rows


def planned(width: int) -> dict[str, float]:
    """Predicted ratios on an H100: of the bytes of a rank, and of the seconds of a step."""
    shape = Shape(128_256, width, 4 * width, 4, width // 128, 8192)
    with torch.device("meta"):
        model = WithLoss(Llama(shape)).to(torch.bfloat16)
        ids = torch.zeros(1, shape.length, dtype=torch.long)
    rows = []
    for way in (False, True):
        torch.compiler.reset()
        rows += search_meshes(
            model, (ids,), world=1, hardware="h100", memory={"chunk_loss": way}
        ).rows
    whole, chunked = rows
    return {
        "memory": chunked.memory.total / whole.memory.total,
        "time": chunked.timing.step / whole.timing.step,
    }


def main() -> int:
    """Print a line for each inner compiler; 1 where the losses differ."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--vocab", type=int, default=32_768)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    shape = Shape(args.vocab, args.width, 2 * args.width, 2, 4, args.rows)
    print(f"{'':12}{'whole MB':>10}{'chunked':>9}{'ratio':>7}{'predicted':>11}{'time':>7}")
    found: dict[str, Any] = {}
    failed = 0
    for inner in ("aot_eager", "inductor"):
        rows = found[inner] = measured(shape, args.device, inner)
        whole, chunked = (rows[name] for name in WAYS)
        ratios = {key: chunked[key] / whole[key] for key in ("peak", "predicted", "time")}
        wrong = not abs(chunked["loss"] / whole["loss"] - 1) < CLOSE
        failed += wrong
        print(
            f"{inner:12}{whole['peak'] / 1e6:10.1f}{chunked['peak'] / 1e6:9.1f}"
            f"{ratios['peak']:7.2f}{ratios['predicted']:11.2f}{ratios['time']:7.2f}"
            f"{'  WRONG' if wrong else ''}"
        )
    print(f"\nplanned {'width':>6}{'memory':>8}{'time':>7}")
    for width in PLANNED:
        ratios = planned(width)
        print(f"h100    {width:6}{ratios['memory']:8.2f}{ratios['time']:7.2f}")
        found[f"planned {width}"] = ratios
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")
    return failed


if __name__ == "__main__":
    raise SystemExit(main())
