"""A step of a small decoder with its loss by chunks of rows beside the one with whole logits.

    python benchmarks/chunked_loss.py [--vocabulary 64000] [--hidden 256] [--rows 4096]

A process for each of inner="aot_eager" and "inductor", with and without chunk_loss=True: the most
memory that it ever had (VmHWM) above what it had before the first step, what `Program.memory()`
says of a step with SGD, and seconds of a step. Peaks and seconds are ratios to whole logits; both
losses must be equal to 1e-5.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

STEPS = 3


def resident(name: str) -> int:
    """Bytes by a line of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))


def step_alone(args: argparse.Namespace) -> dict[str, Any]:
    """Steps of one kind in this process."""
    import torch

    import autoshard
    from llama_model import llama

    torch.manual_seed(0)
    model = llama(vocab_size=args.vocabulary, hidden_size=args.hidden, intermediate_size=args.hidden)
    ids = torch.randint(0, args.vocabulary, (1, args.rows))
    options = {"mesh": {"tp": 1}, "chunk_loss": args.chunked, "inner": args.inner}
    program = autoshard.trace(model, (ids, ids), **options)
    predicted = program.memory("sgd")
    torch.compiler.reset()
    compiled: Any = torch.compile(model, backend="autoshard", options=options)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    seconds, losses = [], []
    before = resident("VmRSS")
    for _ in range(STEPS):
        start = time.perf_counter()
        loss = compiled(ids, ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - start)
        losses.append(float(loss.detach()))
    return {
        "peak": resident("VmHWM") - before,
        "predicted": predicted.peak - predicted.parameters,
        "seconds": min(seconds),
        "losses": losses,
    }
