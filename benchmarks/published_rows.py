"""Rows of a file of published runs: its words as a question to the planner's own estimate.

A row that cannot be asked raises LookupError with the reason. What a trainer does and its rows do
not say is its program's (`PROGRAMS`): a few properties for all rows of a source, never of one row.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from torch import fx

from autoshard.capture import capture, intercept
from autoshard.compiling import lowered_dtypes
from autoshard.config import Config
from autoshard.mesh_search.prices import Asked, MeshPrices
from autoshard.mesh_search.rank_stages import joined, stage_footprint
from autoshard.mesh_search.search import planned_axes, prices_of
from autoshard.mesh_search.stages import Scheduled, step_of
from autoshard.planning import Prices
from autoshard.planning.chunked_loss import chunking_of
from autoshard.planning.cost import Cluster, Machine, cluster
from autoshard.planning.cost.machines import RowExchange
from autoshard.planning.estimate import (
    Layout,
    Training,
    footprint,
    timing,
    waits_of,
)
from autoshard.planning.solver import Chain, cut_stages
from autoshard.runtime import compat
from autoshard.runtime.pipeline import ScheduleShape, is_possible, most_kept, timeline
from repeated_layers import AFTER, BEFORE, Pieces, pieces_of
from row_models import build, few_layers

MACHINES = Path(__file__).parent / "machines"

#: TFLOPS of products of nvfp4, dense, by data sheet: they take the place of float8's.
FLOAT4 = {"b200": 9000.0, "gb200": 10000.0, "b300": 13500.0, "gb300": 15000.0, "mi355x": 10066.0}


@dataclass(frozen=True, kw_only=True)
class Row:
    """A published run, in the words of its file (`what` there says what each means)."""

    source: str
    model: str
    machine: str
    world: int
    mesh: Mapping[str, int] = field(hash=False)
    batch: int
    length: int
    checkpointing: Any = field(default=None, hash=False)
    microbatches: int | None = 1
    tokens: float | None = None
    role: str = "given"
    askable: str = "yes"
    gibibytes: float | None = None
    seconds: float | None = None
    tflops: float | None = None
    float8: bool | str | None = None
    async_tp: bool = False
    schedule: str = "1f1b"
    virtual: int | None = None
    routing: str = "balanced"
    zero: int | None = None
    lora: int | bool = False
    host_offload: str = ""
    chunk_loss: bool = False
    compiled: bool = True
    reduced: str | None = None
    recipe: str | None = None
    note: str = ""

    @property
    def kind(self) -> str:
        """The axes that make a plan hard."""
        found = [axis for axis in ("pp", "ep", "cp") if self.mesh.get(axis, 1) > 1]
        return " x ".join(found) or "dense"

    @property
    def steps(self) -> int:
        """Micro-batches of a step; computed where the step's time and its tokens are printed."""
        if self.microbatches is not None:
            return self.microbatches
        if self.tokens is None or self.seconds is None:
            raise LookupError("the number of micro-batches is not published")
        alike = self.mesh.get("tp", 1) * self.mesh.get("cp", 1) * self.mesh.get("pp", 1)
        return max(1, round(alike * self.tokens * self.seconds / (self.batch * self.length)))


def rows_of(body: Mapping[str, Any]) -> list[Row | tuple[dict[str, Any], str]]:
    """The rows of a file; one with a word that is not known as it stands, with the reason."""
    known = {one.name for one in fields(Row)}
    found: list[Row | tuple[dict[str, Any], str]] = []
    for run in body["runs"]:
        words = sorted(set(run) - known)
        found.append((run, f"unknown words: {', '.join(words)}") if words else Row(**run))
    return found


@dataclass(frozen=True, kw_only=True)
class Program:
    """What a trainer does on every run. recipe: as in Training. reduced: as in `precision`. fused:
    products of tp beside their collectives. rows: how rows travel to experts. overlapped: parts of
    the transfers of pp, and of parameters beside it, that compute hides, where the machine's
    `overlap` says how much. shares: what of `Efficiency` its kernels get in place of the machine's,
    as parts of that."""

    recipe: str = "mixed"
    reduced: str = "float32"
    fused: bool = False
    rows: RowExchange = RowExchange()
    overlapped: bool = False
    shares: Mapping[str, float] = field(default_factory=dict)


MEGATRON = Program(
    recipe="master",
    fused=True,
    rows=RowExchange(deduplicated=True, overlap=0.5),
    overlapped=True,
    shares={"compute": 1.2, "attention": 1.7},
)
PROGRAMS: dict[str, Program] = {
    "titan": Program(),
    "automodel": Program(recipe="pure", reduced="bfloat16", rows=RowExchange(True, 0.0)),
    "trl": Program(recipe="pure", reduced="bfloat16"),
    "gpu-recipes": Program(overlapped=True),
    "nnscaler": Program(),
    "mbridge": MEGATRON,
    "nemo": MEGATRON,
    "mlperf": MEGATRON,
}
NATURAL = 1.2
"""Rows of the busiest rank by the mean's, where a router chooses as it was trained to."""


def program_of(row: Row) -> Program:
    """The program of a row's source, with what the row says is different."""
    found = next((one for name, one in PROGRAMS.items() if row.source.startswith(name)), Program())
    note = row.note.lower()
    if "plain all-to-all" in note:
        found = replace(found, rows=RowExchange())
    if row.async_tp:
        found = replace(found, fused=True)
    given = {"recipe": row.recipe, "reduced": row.reduced}
    return replace(found, **{name: value for name, value in given.items() if value})


def machine_of(name: str, row: Row | None, machines: Mapping[str, Any]) -> Cluster:
    """A machine of a file: built in, or described beside this file; with the program's shares."""
    body = machines.get(name, {})
    own = MACHINES / f"{name}.json"
    base = cluster(str(own) if own.exists() else body.get("device", name))
    device, inside, between = base.device, base.inside, base.between
    if "memory_gb" in body:
        rate = 1e9 * body["memory_gbps"]
        device = replace(device, memory_bytes=int(1e9 * body["memory_gb"]), memory_bandwidth=rate)
        inside, between = (replace(link, copy_bandwidth=rate) for link in (inside, between))
    if "between_gbps" in body:
        between = replace(between, bandwidth=1e9 * body["between_gbps"] / 8)
    share = base.efficiency
    share = replace(share, compute=share.compute * body.get("power", 1.0))
    base = replace(base, device=device, inside=inside, between=between, efficiency=share)
    return replace(base, per_node=body.get("per_node", base.per_node))


def of_program(machine: Cluster, row: Row) -> Cluster:
    """A machine as a row's program uses it."""
    program, device = program_of(row), machine.device
    if isinstance(row.float8, str) and "fp4" in row.float8:
        if device.name not in FLOAT4:
            raise LookupError(f"no rate of nvfp4 is known of {device.name}")
        flops = {**device.flops, "float8": FLOAT4[device.name] * 1e12}
        device = replace(device, flops=flops)
    share = machine.efficiency
    given = {name: getattr(share, name) * part for name, part in program.shares.items()}
    return replace(machine, device=device, efficiency=replace(share, **given), rows=program.rows)


class Question(NamedTuple):
    """What is traced for a row: alike for rows that differ only in what is priced afterwards."""

    model: str
    batch: int
    length: int
    checkpointing: str
    axes: tuple[tuple[str, int], ...]
    zero: int
    lora: int
    attention_only: bool
    chunk_loss: bool
    offloaded: bool
    fused: bool
    float8: bool
    modules: tuple[str, ...]


def question_of(row: Row, checkpointing: str) -> Question:
    """The question of a row, with its layers checkpointed so."""
    program = program_of(row)
    axes = tuple((axis, row.mesh[axis]) for axis in ("ep", "cp", "tp") if row.mesh.get(axis, 1) > 1)
    named = dict(axes)
    if row.mesh.get("pp", 1) > 1 and ("ep" in named or ("cp" in named and "tp" not in named)):
        axes = (("pp", 2), *axes)  # which only says that there are stages
    return Question(
        model=row.model,
        batch=row.batch,
        length=row.length,
        checkpointing=checkpointing,
        axes=axes,
        zero=3 if row.zero is None else row.zero,
        lora=16 if row.lora is True else int(row.lora),
        attention_only="lora of attention" in row.note.lower(),
        chunk_loss=row.chunk_loss,
        offloaded=bool(row.host_offload),
        fused=program.fused and row.mesh.get("tp", 1) > 1,
        float8=bool(row.float8),
        modules=tuple(row.checkpointing) if isinstance(row.checkpointing, list) else (),
    )


def training_of(row: Row) -> Training:
    """How a row's model is trained, a batch a step."""
    return Training(
        recipe=program_of(row).recipe,
        compiled=row.compiled,
        float8=bool(row.float8),
        imbalance=1.0 if row.routing == "balanced" else NATURAL,
    )


def traced(one: Question, body: Mapping[str, Any], row: Row, machine: Cluster) -> Pieces:
    """The planned pieces of a row's model."""
    few = few_layers(body, one.length)
    model, args, kwargs = build(
        few, one.batch, one.length, one.checkpointing, one.lora, one.attention_only
    )
    mesh = dict(one.axes) or {"tp": 1}
    fused = one.fused and "pp" not in mesh
    config = Config(zero=one.zero, chunk_loss=one.chunk_loss, fuse_collectives=fused)
    # weights stay where they are, activations are split along the sequence where they can be
    byte = 5 * 2.0 / machine.device.memory_bandwidth
    dear = Prices(None, byte, gathers_weights=False) if mesh.get("tp", 1) > 1 else None
    losses = chunking_of(one.chunk_loss, True)
    asked = Asked(config, training_of(row), 2**60, None, 1, losses)

    def found(
        gm: fx.GraphModule, example_inputs: Sequence[Any], inputs: list[compat.GraphInput]
    ) -> MeshPrices:
        captured = capture(gm, example_inputs, lowered_dtypes(inputs))
        return prices_of(captured, inputs, planned_axes(mesh, config), machine, asked, dear)

    choices = intercept(model, args, kwargs, found)
    return pieces_of(choices, few.at, one.offloaded, one.modules)


class Said(NamedTuple):
    """Tokens a second and device, a device's gibibytes, and the part of a pipeline that waits."""

    tokens: float
    gibibytes: float
    idle: float = 0.0


def layout_of(row: Row) -> Layout:
    """The data-parallel axes of a row. A distributed optimizer splits over all of them."""
    mesh = {axis: size for axis, size in row.mesh.items() if axis != "pp"}
    if row.zero == 1 and "dp_replicate" in mesh:
        mesh["dp_shard"] = mesh.get("dp_shard", 1) * mesh.pop("dp_replicate")
    layout = Layout.of({**mesh, "pp": row.mesh.get("pp", 1)}, row.zero or 3, None)
    return replace(layout, staged=row.zero == 1 or row.mesh.get("pp", 1) > 1)


def priced(row: Row, pieces: Pieces, kinds: Sequence[str], machine: Cluster) -> Said:
    """The estimate of a row whose pieces are at hand. kinds: of all its layers."""
    laid, layout, training = machine.on(row.mesh), layout_of(row), training_of(row)
    if row.mesh.get("pp", 1) > 1:
        seconds, nbytes, idle = _pipeline(row, pieces, kinds, laid, layout, training)
    else:
        whole, idle = pieces.joined([BEFORE, *kinds, AFTER]), 0.0
        one = timing(whole, layout, training, laid)
        seconds = row.steps * (one.step - one.optimizer) + one.optimizer
        if layout.staged:  # weights are gathered, and gradients reduced, once a step
            ranks = {**dict.fromkeys(("tp", "cp"), whole.n), **layout.ranks}
            _, *waits = waits_of(whole, ranks, laid.real_links)
            bare = whole.compute + sum(map(sum, waits))
            seconds = (row.steps - 1) * bare + one.step
        held = stage_footprint if layout.staged else footprint
        nbytes = held(whole, layout, replace(training, microbatches=row.steps)).total
    return Said(_tokens(row, seconds), nbytes / 2**30, idle)


def _tokens(row: Row, seconds: float) -> float:
    alike = row.mesh.get("tp", 1) * row.mesh.get("cp", 1) * row.mesh.get("pp", 1)
    return row.steps * row.batch * row.length / alike / seconds


def _pipeline(
    row: Row,
    pieces: Pieces,
    kinds: Sequence[str],
    machine: Machine,
    layout: Layout,
    training: Training,
) -> tuple[float, int, float]:
    """Seconds of a step, bytes of the largest rank, the part of the schedule that ranks wait."""
    ranks, count = row.mesh["pp"], row.steps
    chunks = (row.virtual or 2) if row.schedule == "interleaved" else 1
    flush = re.search(r"flushed every (\d+)", row.note)
    once = int(flush[1]) if flush else count
    shape = ScheduleShape(ranks, once, chunks)
    if not is_possible(row.schedule, shape):
        raise LookupError(f"{once} micro-batches are no whole groups of {ranks}")
    link, hidden = machine.real_links["pp"], 0.0
    if program_of(row).overlapped:
        hidden = machine.efficiency.overlap
    over = (1 - hidden) * link.seconds(pieces.sent)
    axes = {"tp": row.mesh.get("tp", 1), "cp": row.mesh.get("cp", 1), **layout.ranks}
    took: dict[str, tuple[float, float]] = {}
    for kind, one in pieces.profiles.items():
        _, ahead, back = waits_of(one, axes, machine.real_links)
        took[kind] = sum(one.forward) + sum(ahead), sum(one.backward) + sum(back)
    units = [BEFORE, *kinds, AFTER]
    chain = Chain(
        seconds=[sum(took[unit]) for unit in units],
        sent=[0.0, *[2 * over] * (len(units) - 1), 0.0],
        kept=[0.0] * len(units),
    )
    found = cut_stages(chain, ranks * chunks, once)
    if found is None:
        raise LookupError(f"{len(units)} pieces are no {ranks * chunks} stages")
    spans = list(zip([0, *found.cuts], [*found.cuts, len(units)]))
    live = [most_kept(row.schedule, shape, rank) for rank in range(ranks)]
    stages = [
        pieces.joined(units[a:b], live[stage % ranks][stage // ranks])
        for stage, (a, b) in enumerate(spans)
    ]
    forward, backward = (
        [sum(took[unit][which] for unit in units[a:b]) + over for a, b in spans] for which in (0, 1)
    )
    times = timeline(row.schedule, once, forward, backward, chunks)
    one = Scheduled(
        parts=[joined(stages[rank::ranks]) for rank in range(ranks)],
        sent=((pieces.sent, 1),) * (len(spans) - 1),
        seconds=tuple(zip(forward, backward)),
        times=times,
        stages=(),
        microbatches=once,
    )
    _, memory, step, price = step_of(one, axes, machine, layout, training, 0.0)
    data = step.step - times.seconds - step.optimizer
    total = count / once * times.seconds + (1 - hidden) * data + step.optimizer
    return total, memory.total, times.idle


Get = Callable[[Question, Row, Cluster], Pieces]


def answer(row: Row, body: Mapping[str, Any], machine: Cluster, get: Get) -> Said:
    """The estimate of a row. body: its model's. get: traces, or finds what was traced."""
    machine, kinds = of_program(machine, row), few_layers(body, row.length).kinds

    def said(checkpointing: str) -> Said:
        return priced(row, get(question_of(row, checkpointing), row, machine), kinds, machine)

    how = row.checkpointing
    if isinstance(how, list):
        return said("none")
    if how is None:  # not published: the least with which it fits
        one = said("none")
        return one if one.gibibytes * 2**30 <= machine.usable_bytes else said("full")
    if part := re.fullmatch(r"full on (\d+) of (\d+) layers", how):
        whole, none, full = int(part[1]) / int(part[2]), said("none"), said("full")
        seconds = (1 - whole) / none.tokens + whole / full.tokens
        nbytes = (1 - whole) * none.gibibytes + whole * full.gibibytes
        return Said(1 / seconds, nbytes, none.idle)
    if how not in ("none", "full", "selective"):
        raise LookupError(f"checkpointing {how!r} is not known")
    return said(how)


def published(row: Row, pieces: Pieces, kinds: Sequence[str]) -> float:
    """Tokens a second of a row; computed from the model's operations where these are printed."""
    if row.tokens is not None:
        return row.tokens
    if row.tflops is None:
        raise LookupError("neither tokens nor tflops are published")
    return row.tflops
