"""How long autoshard takes before a step can run, by depth: a 7B-shape Llama, tp=8, on one CPU.

    python benchmarks/planning.py                     # 2 to 80 layers, as a Markdown table
    python benchmarks/planning.py --layers 8 32 --world 8 64 --json planning.json

The model is on meta tensors (no memory, no GPU, no processes). Columns:

    nodes        operators of the captured serial graph
    variables    decisions of the planner: a strategy a node, a state a shared copy
    width        most variables in one table of the solver (treewidth + 1)
    work         table entries the solver computed; what should be linear in depth
    dynamo       seconds in torch._dynamo itself, which every torch.compile pays
    capture, plan, rewrite   seconds in autoshard: ATen capture and passes before the plan;
                 problem and solver; local shapes and collectives
    total        the whole of `autoshard.trace`, in seconds

A second table is `autoshard.plan`, the search for a mesh, by depth and by the size of the world:

    meshes       factorisations of the world that were priced, with `sizes` of the tp axis planned
    price        seconds in planning each size of tp and pricing each mesh
    depth, time  layers, and total seconds, in units of the first row of the same world: linear
                 planning has time <= depth

With --unrolled STEPS ...: a recurrence that is unrolled, whose steps all read the same weights: the
table entries and seconds of its plan, and by how much another may be cheaper.

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
from autoshard import tracing
from autoshard.building import first_axis
from autoshard.building import one_rank as build
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


def measure(layers: int, tp: int = 8, tokens: int = 4096, cp: int = 1) -> dict[str, float]:
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
        mock.patch.object(first_axis, "plan_graph", watch.around("plan", first_axis.plan_graph)),
        mock.patch.object(first_axis, "plan_both", watch.around("plan", first_axis.plan_both)),
        mock.patch.object(Localize, "run", watch.around("rewrite", Localize.run)),
    ):
        start = time.process_time()
        batch = {"input_ids": ids, "labels": ids}
        mesh = {"cp": cp, "tp": tp} if cp > 1 else {"tp": tp}
        program = autoshard.trace(model, kwargs=batch, mesh=mesh, hardware="h100")
        total = time.process_time() - start
    seconds, decisions = watch.seconds, program.decisions
    return {
        "layers": layers,
        "nodes": sum(node.op == "call_function" for node in program.serial.graph.nodes),
        "variables": decisions.variables,
        "width": decisions.width,
        "work": decisions.work,
        "dynamo": total - seconds["build"],
        "capture": seconds["capture"],
        "plan": seconds["plan"],
        "rewrite": seconds["rewrite"],
        "total": total,
    }


SEARCH_COLUMNS = (
    *("world", "layers", "meshes", "sizes", "again", "dynamo", "capture", "price", "total"),
    *("depth", "time"),
)


def measure_search(layers: int, world: int, tokens: int = 4096) -> dict[str, float]:
    """One row of the second table, without its ratios."""
    torch.compiler.reset()
    gc.collect()
    model = llama(layers)
    ids = torch.zeros(1, tokens, dtype=torch.long, device="meta")
    times: list[float] = []
    begun: list[str] = []

    def begin(what: str, *_: int) -> None:
        begun.append(what)
        times.append(time.process_time())

    found = autoshard.search_meshes(
        model,
        kwargs={"input_ids": ids, "labels": ids},
        world=world,
        progress=begin,
    )
    times.append(time.process_time())
    return {
        "world": world,
        "layers": layers,
        "meshes": len(found.rows),
        "sizes": sum(what.startswith("planning") for what in begun),
        "again": sum(row.recomputation is not None for row in found.rows),
        "dynamo": times[1] - times[0],
        "capture": times[2] - times[1],
        "price": times[-1] - times[2],
        "total": times[-1] - times[0],
    }


def ratios(rows: list[dict[str, float]]) -> None:
    """Add `depth` and `time` to each row, against the first one of the same world."""
    for row in rows:
        first = next(one for one in rows if one["world"] == row["world"])
        row["depth"] = row["layers"] / first["layers"]
        row["time"] = row["total"] / first["total"]


def table(columns: tuple[str, ...]) -> str:
    """The head of a Markdown table."""
    return "| " + " | ".join(columns) + " |\n|" + " ---: |" * len(columns)


def text(cell: float) -> str:
    """`1,234` or `0.12`."""
    return f"{cell:,}" if isinstance(cell, int) else f"{cell:.2f}"


class Unrolled(torch.nn.Module):
    """A state space that mixes channels, a step of Python for each token."""

    def __init__(self, width: int, states: int) -> None:
        super().__init__()
        linear = torch.nn.Linear
        self.up, self.down = linear(width, width), linear(width, width)
        self.write, self.read = linear(width, states), linear(width, states)
        self.mix = torch.nn.Parameter(torch.zeros(width, width))
        self.decay = torch.nn.Parameter(torch.zeros(width, states))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, tokens, width]; the same."""
        x, made = self.up(x), []
        write, read = self.write(x), self.read(x)
        state = x.new_zeros(x.shape[0], *self.decay.shape)
        for t in range(x.shape[1]):
            kept = torch.einsum("de,ben->bdn", self.mix, torch.exp(-self.decay) * state)
            state = kept + torch.einsum("bd,bn->bdn", x[:, t], write[:, t])
            made.append(torch.einsum("bdn,bn->bd", state, read[:, t]))
        return self.down(torch.stack(made, 1))


def unrolled(lengths: list[int]) -> None:
    """Print the size of the plan of each length."""
    print(table(("steps", "variables", "work", "plan", "gap")))
    for steps in lengths:
        torch.compiler.reset()
        with torch.device("meta"):
            model, x = Unrolled(16, 8), torch.zeros(4, steps, 16)
        watch = Stopwatch()
        with mock.patch.object(build, "plan_graph", watch.around("plan", build.plan_graph)):
            made = autoshard.trace(model, (x,), mesh={"tp": 2}).decisions
        seconds, gap = watch.seconds["plan"], made.gap / made.seconds
        row = (steps, made.variables, made.work, seconds, gap)
        print("| " + " | ".join(map(text, row)) + " |", flush=True)


def main() -> None:
    """Measure each depth and print the table as it grows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", type=int, nargs="+", default=LAYERS)
    parser.add_argument("--tp", type=int, default=8)
    parser.add_argument("--cp", type=int, default=1, help="beside tp, planned together with it")
    parser.add_argument("--world", type=int, nargs="*", default=(8, 64))
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--unrolled", type=int, nargs="+", help="steps of a recurrence")
    options = parser.parse_args()
    if options.unrolled:
        unrolled(options.unrolled)
        return

    torch.set_num_threads(1)
    measure(1, options.tp)  # imports and first calls of torch are nobody's planning time
    print(table(COLUMNS))
    rows = []
    for layers in options.layers:
        row = measure(layers, options.tp, cp=options.cp)
        rows.append(row)
        print("| " + " | ".join(text(row[column]) for column in COLUMNS) + " |", flush=True)
    searches: list[dict[str, float]] = []
    if options.world:
        print("\n" + table(SEARCH_COLUMNS))
    for world in options.world:
        for layers in options.layers:
            searches.append(measure_search(layers, world))
            ratios(searches)
            row = searches[-1]
            print("| " + " | ".join(text(row[c]) for c in SEARCH_COLUMNS) + " |", flush=True)
    if options.json:
        body = {"tp": options.tp, "cp": options.cp, "rows": rows, "search": searches}
        options.json.write_text(json.dumps(body, indent=1) + "\n")


if __name__ == "__main__":
    main()
