"""Training runs that others have published: what they measured, and what `autoshard plan` says.

    python benchmarks/published_runs.py [--json FILE] [--rows FILE [--propose [ROW ...]]]

The runs, with their sources, are data: published_runs.json. A model is traced on the meta device
with 2 and with 3 layers, and a step's time and memory continued to its depth: both are sums over
equal layers. Half of the runs served to fit the built-in machines, the others did not.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import fx, nn

sys.path.insert(0, str(Path(__file__).parent))

import row_words
from autoshard.building import ask, batch_facts
from autoshard.capture import capture, intercept
from autoshard.config import Config
from autoshard.mesh_search import MeshPrice, search_meshes
from autoshard.parameters import lowered_dtypes
from autoshard.planning import Plan, Prices, plan_graph, with_graph
from autoshard.planning.cost import Cluster
from autoshard.planning.estimate import Training
from autoshard.runtime import compat
from autoshard.runtime.mesh import offline_mesh
from decoder import Decoder, Shape

DEPTHS = (2, 3)
BODY = json.loads((Path(__file__).parent / "published_runs.json").read_text())


@dataclass(frozen=True, kw_only=True)
class Run:
    """One published run.

    batch, length: sequences of a data-parallel rank in one pass, and their tokens. reduced: the
    dtype in which gradients travel. recipe: as in Training. deferred: whether gradients are kept
    whole until the last microbatch. uncompiled_loss: of a model that is compiled. whole_scores:
    whether each rank of tp gathers the scores of the vocabulary. tokens: a second
    and device, measured. gibibytes: a device's, where they are published. role: "fitted" or "held
    out".
    """

    source: str
    model: str
    machine: str
    world: int
    mesh: dict[str, int] = field(hash=False)
    batch: int
    length: int
    checkpointing: str
    tokens: float
    role: str
    gibibytes: float | None = None
    compiled: bool = True
    float8: bool = False
    microbatches: int = 1
    reduced: str = "float32"
    uncompiled_loss: bool = False
    recipe: str = "mixed"
    deferred: bool = False
    whole_scores: bool = False


class Predicted(NamedTuple):
    """Tokens a second and device, and a device's gibibytes."""

    tokens: float
    gibibytes: float


RUNS = [Run(**run) for run in BODY["runs"]]


def machine_of(name: str) -> Cluster:
    """The machine of a run."""
    return row_words.machine_of(name, BODY["machines"])


def megatron(model: nn.Module, ids: torch.Tensor, machine: Cluster, n: int) -> Plan:
    """The plan that runs with tp follow: weights stay where they are, activations are split along
    the sequence where they can be."""

    def plan(
        gm: fx.GraphModule, example_inputs: Sequence[Any], inputs: list[compat.GraphInput]
    ) -> Plan:
        captured = capture(gm, example_inputs, lowered_dtypes(inputs))
        here, mesh = machine.on({"tp": n}), offline_mesh({"tp": n}, 0)
        made = ask(captured, inputs, mesh, Config(), here, facts=batch_facts(inputs))
        dear = Prices(None, 5 * 2.0 / here.device.memory_bandwidth, gathers_weights=False)
        request = replace(made.request, prices=dear)
        decisions = plan_graph(made.serial, n, here, request)
        return with_graph(None, decisions, request, made.serial, n)

    found: Plan = intercept(model, (ids,), None, plan)
    return found


def priced(run: Run, layers: int, machine: Cluster) -> MeshPrice:
    """The row of the plan for a run's model with so many layers."""
    shape = Shape(
        **{**BODY["models"][run.model], "layers": layers},
        length=run.length,
        checkpointing=run.checkpointing,
    )
    with torch.device("meta"):
        model = Decoder(shape).to(torch.bfloat16)
        ids = torch.zeros(run.batch, run.length, dtype=torch.long)
    one_layer = sum(p.numel() for p in model.layers[0].parameters()) * 2
    training = Training(
        recipe=run.recipe,
        microbatches=run.microbatches,
        compiled=run.compiled,
        float8=run.float8,
    )
    ranks = run.mesh.get("tp", 1)
    plan = megatron(model, ids, machine, ranks) if ranks > 1 else None
    roomy = replace(machine, device=replace(machine.device, memory_bytes=2**50))
    found = search_meshes(
        model,
        (ids,),
        world=run.world,
        mesh=run.mesh,
        hardware=roomy,
        training=training,
        planner={"bucket_bytes": one_layer // ranks},
        precision={"reduce": run.reduced},
        gradients={"defer": run.deferred},
        memory={"chunk_loss": False},
        plan=plan,
    )
    return found.rows[0]


def predicted(run: Run, machine: Cluster | None = None) -> Predicted:
    """The estimate of a run at its whole depth, from two shallow ones."""
    few, more = (priced(run, layers, machine or machine_of(run.machine)) for layers in DEPTHS)
    depth = BODY["models"][run.model]["layers"]
    times = (depth - DEPTHS[0]) / (DEPTHS[1] - DEPTHS[0])

    def whole(first: float, second: float) -> float:
        return first + times * (second - first)

    seconds = whole(few.timing.step, more.timing.step)
    nbytes = whole(few.memory.total, more.memory.total)
    ranks = run.mesh.get("tp", 1) * run.mesh.get("cp", 1)
    tokens = run.batch * run.length / ranks
    if run.uncompiled_loss:  # the gradients of float32 logits and of their logarithms, at once
        nbytes += 4 * tokens * BODY["models"][run.model]["vocab"]
    if run.whole_scores:  # what other ranks made of them, in float32, and their gradients
        others = run.mesh["tp"] - 1
        nbytes += 8 * tokens * others * BODY["models"][run.model]["vocab"]
    return Predicted(run.microbatches * tokens / seconds, nbytes / 2**30)


def error(said: float, measured: float) -> float:
    """How far a prediction is from what was measured, as a part of it."""
    return said / measured - 1


def errors(rows: Iterable[tuple[Run, Predicted]], role: str) -> list[float]:
    """The errors in tokens a second of the runs with this role, without their signs."""
    return [abs(error(said.tokens, run.tokens)) for run, said in rows if run.role == role]


def cells(run: Run, said: Predicted) -> list[str]:
    """A run's row of the table."""
    mesh = " ".join(f"{axis}={size}" for axis, size in run.mesh.items())
    how = [run.checkpointing] * (run.checkpointing != "none")
    how += ["float8"] * run.float8 + ["uncompiled"] * (not run.compiled)
    how += [f"{run.microbatches} microbatches"] * (run.microbatches > 1)
    said = Predicted(round(said.tokens), round(said.gibibytes, 1))  # as they are printed
    memory = ["", "", ""]
    if run.gibibytes is not None:
        off = f"{100 * error(said.gibibytes, run.gibibytes):+.0f}%"
        memory = [f"{run.gibibytes:.1f}", f"{said.gibibytes:.1f}", off]
    return [
        run.source,
        run.model,
        run.machine,
        mesh,
        f"{run.batch} x {run.length}",
        ", ".join(how),
        f"{run.tokens:,.0f}",
        f"{said.tokens:,.0f}",
        f"{100 * error(said.tokens, run.tokens):+.0f}%",
        *memory,
        run.role,
    ]


HEADER = (
    *("source", "model", "machine", "mesh", "batch", "how"),
    *("tokens/s a GPU", "predicted", "error", "GiB a GPU", "predicted", "error", "role"),
)


def table(rows: Iterable[tuple[Run, Predicted]]) -> str:
    """The runs as a Markdown table."""
    return markdown([HEADER, ["---"] * len(HEADER), *(cells(run, said) for run, said in rows)])


def markdown(lines: Iterable[Sequence[str]]) -> str:
    """The lines of a table, without the blanks that nobody sees."""
    return "\n".join("|" + "|".join(line) + "|" for line in lines)


def summary(rows: Sequence[tuple[Run, Predicted]]) -> str:
    """Median and largest errors, of the runs that were fitted and of the others, and of memory."""
    lines = []
    for role in ("fitted", "held out"):
        found = errors(rows, role)
        lines.append(
            f"tokens a second, {role}: {len(found)} runs, median error "
            f"{100 * statistics.median(found):.0f}%, largest {100 * max(found):.0f}%"
        )
    held = [abs(error(said.gibibytes, run.gibibytes)) for run, said in rows if run.gibibytes]
    lines.append(
        f"memory: {len(held)} runs, median error {100 * statistics.median(held):.0f}%, "
        f"largest {100 * max(held):.0f}%"
    )
    return "\n".join(lines)


def main() -> None:
    """Price each run and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--rows", type=Path, help="a file of rows of any source, in their words")
    beside = (
        "beside --rows: the best layout by autoshard plan, of rows by number or words of a name"
    )
    parser.add_argument("--propose", nargs="*", metavar="ROW", help=beside)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.rows:
        import row_table  # which imports transformers

        body = json.loads(options.rows.read_text())
        found = row_table.outcomes(body, options.propose or ())
        if options.propose is not None:
            print(row_table.proposals(found, body))
            return
        print(f"{row_table.table(found)}\n\n{row_table.summary(found)}")
        return
    rows = [(run, predicted(run)) for run in RUNS]
    print(table(rows))
    print(f"\n{summary(rows)}")
    if options.json:
        body = [{**vars(run), "predicted": said._asdict()} for run, said in rows]
        options.json.write_text(json.dumps(body, indent=1) + "\n")


if __name__ == "__main__":
    main()
