"""Time of dropout that does not depend on the mesh, beside aten.native_dropout; forward and back.

python benchmarks/dropout.py [--shape 4 512 2048] [--device cpu] [--threads 1]
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch._inductor.utils import fresh_cache

from autoshard.runtime.compat.inductor import inductor_compile
from autoshard.runtime.randomness.draws import native_dropout
from autoshard.runtime.randomness.philox import Part


def milliseconds(step: Callable[[], Any], device: str, repeats: int) -> float:
    """The median of `repeats` steps, after two that are not counted."""
    times = []
    for i in range(repeats + 2):
        start = time.perf_counter()
        step()
        if device == "cuda":
            torch.cuda.synchronize()
        if i > 1:
            times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def main() -> None:
    """Print a table of milliseconds, and ratios to aten.native_dropout of the same compiler."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", type=int, nargs="+", default=[4, 512, 2048])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    x = torch.randn(arguments.shape, device=arguments.device, requires_grad=True)
    gradient = torch.randn_like(x)
    seed = torch.tensor(1234, device=arguments.device)
    last = x.dim() - 1
    part = Part(last, x.shape[last], 2 * x.shape[last])
    kinds: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "native": lambda x: torch.native_dropout(x, 0.1, True)[0],
        "invariant": lambda x: native_dropout(x, seed, 0.1, 0)[0],
        "invariant, shard of the last dim": lambda x: native_dropout(x, seed, 0.1, 0, part)[0],
    }
    fused = functools.partial(inductor_compile, cut=lambda *_: None)
    rows = []
    for compiler in ("eager", "inductor"):
        first = 0.0
        for name, function in kinds.items():
            torch.compiler.reset()
            compiled = compiler == "inductor"
            run = torch.compile(function, backend=fused) if compiled else function

            def forward(run: Any = run) -> None:
                with torch.no_grad():
                    run(x)

            def both(run: Any = run) -> None:
                x.grad = None
                run(x).backward(gradient)

            times = [
                milliseconds(step, arguments.device, arguments.repeats) for step in (forward, both)
            ]
            first = first or times[1]
            rows.append(
                {
                    "compiler": compiler,
                    "kind": name,
                    "forward_ms": times[0],
                    "both_ms": times[1],
                    "ratio": times[1] / first,
                }
            )
            print(
                f"{compiler:9} {name:34} forward {times[0]:8.2f} ms   "
                f"and backward {times[1]:8.2f} ms   ratio {times[1] / first:5.2f}",
                flush=True,
            )
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    with fresh_cache():  # the cache of AOTAutograd does not know how we decompose our operators
        main()
