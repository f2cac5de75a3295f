"""How long autoshard takes before a step can run, by depth: a 7B-shape Llama, tp=8, on one CPU.

    python benchmarks/planning.py                     # 2 to 80 layers, as a Markdown table
    python benchmarks/planning.py --layers 32 --json planning.json

The model is on meta tensors (no memory, no GPU, no processes). Columns:

    nodes        operators of the captured serial graph
    variables    decisions of the planner: a strategy a node, a state a shared copy
    width        most variables in one table of the solver (treewidth + 1)
    work         table entries the solver computed; what should be linear in depth
    dynamo       seconds in torch._dynamo itself, which every torch.compile pays
    capture, plan, rewrite   seconds in autoshard: ATen capture and passes before the plan;
                 problem and solver; local shapes and collectives
    total        the whole of `autoshard.trace`, in seconds

Seconds are processor time of the one process and thread at work: a quiet machine's clock shows
the same, and a busy one's does not disturb the figures.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import autoshard
from autoshard import build, tracing
from autoshard.passes.localize import Localize

LAYERS = (2, 4, 8, 16, 32, 80)
COLUMNS = (
    *("layers", "nodes", "variables", "width", "work"),
    *("dynamo", "capture", "plan", "rewrite", "total"),
)


def llama(layers: int) -> torch.nn.Module:
    """A Llama of 7B shape with `layers` layers, on the meta device."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=layers,
        num_attention_heads=32,
        use_cache=False,
    )
    with torch.device("meta"):
        model: torch.nn.Module = transformers.LlamaForCausalLM(config)
    return model


class Stopwatch:
    """Seconds spent in functions, by the name they are entered under."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, with its time added to `name`."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                spent = time.process_time() - start
                self.seconds[name] = self.seconds.get(name, 0.0) + spent

        return timed


def measure(layers: int, tp: int = 8, tokens: int = 4096) -> dict[str, float]:
    """One row of the table."""
    torch.compiler.reset()
    gc.collect()
    model = llama(layers)
    ids = torch.zeros(1, tokens, dtype=torch.long, device="meta")
    watch = Stopwatch()
    with (
        mock.patch.object(tracing, "build_program", watch.around("build", build.build_program)),
        mock.patch.object(build, "capture", watch.around("capture", build.capture)),
        mock.patch.object(build, "prepare", watch.around("capture", build.prepare)),
        mock.patch.object(build, "plan_graph", watch.around("plan", build.plan_graph)),
        mock.patch.object(Localize, "run", watch.around("rewrite", Localize.run)),
    ):
        start = time.process_time()
        batch = {"input_ids": ids, "labels": ids}
        program = autoshard.trace(model, kwargs=batch, mesh={"tp": tp}, hardware="h100")
        total = time.process_time() - start
    seconds, decisions = watch.seconds, program.decisions
    problem = decisions.builder.problem
    return {
        "layers": layers,
        "nodes": sum(node.op == "call_function" for node in program.serial.graph.nodes),
        "variables": len(problem.variables) + len(problem.copies),
        "width": decisions.width,
        "work": decisions.work,
        "dynamo": total - seconds["build"],
        "capture": seconds["capture"],
        "plan": seconds["plan"],
        "rewrite": seconds["rewrite"],
        "total": total,
    }


def text(cell: float) -> str:
    """`1,234` or `0.12`."""
    return f"{cell:,}" if isinstance(cell, int) else f"{cell:.2f}"


def main() -> None:
    """Measure each depth and print the table as it grows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", type=int, nargs="+", default=LAYERS)
    parser.add_argument("--tp", type=int, default=8)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    options = parser.parse_args()

    torch.set_num_threads(1)
    measure(1, options.tp)  # imports and first calls of torch are nobody's planning time
    print("| " + " | ".join(COLUMNS) + " |")
    print("|" + " ---: |" * len(COLUMNS))
    rows = []
    for layers in options.layers:
        row = measure(layers, options.tp)
        rows.append(row)
        print("| " + " | ".join(text(row[column]) for column in COLUMNS) + " |", flush=True)
    if options.json:
        options.json.write_text(json.dumps({"tp": options.tp, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
