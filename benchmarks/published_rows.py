"""A published row as a question to the planner's own estimate: what is traced, and its price.

A row that cannot be asked raises LookupError with the reason.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from torch import fx

from autoshard.capture import capture, intercept
from autoshard.cli.arguments import roomier
from autoshard.config import Config
from autoshard.mesh_search import MeshSearch, search_meshes
from autoshard.mesh_search.factorisations import Asked, planned_axes
from autoshard.mesh_search.prices import MeshPrices
from autoshard.mesh_search.rank_stages import cut_units, joined, pass_seconds, stage_footprint
from autoshard.mesh_search.search import prices_of
from autoshard.mesh_search.stages import RankCosts, Scheduled, step_of
from autoshard.parameters import lowered_dtypes
from autoshard.planning import Prices
from autoshard.planning.chunked_loss import chunking_of
from autoshard.planning.cost import Cluster, Machine
from autoshard.planning.estimate import (
    Footprint,
    Layout,
    Profile,
    Training,
    footprint,
    timing,
    waits_of,
)
from autoshard.runtime import compat
from autoshard.runtime.pipeline import Duration, ScheduleShape, is_possible, kept_at_once, timeline
from repeated_layers import AFTER, BEFORE, Keeps, Pieces, pieces_of
from row_models import build, few_layers
from row_words import NATURAL, Row, of_program, program_of


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
    fused: bool
    compiled: bool
    keeps: Keeps


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
        lora=lora_of(row),
        attention_only=is_of_attention(row),
        chunk_loss=row.chunk_loss,
        fused=program.fused and row.mesh.get("tp", 1) > 1,
        compiled=training_of(row).compiled,
        keeps=Keeps(
            tuple(row.checkpointing) if isinstance(row.checkpointing, list) else (),
            bool(row.host_offload),
            program.thrifty,
            bool(row.float8),
        ),
    )


def lora_of(row: Row) -> int:
    """The rank of a row's adapters, 0 where it has none."""
    return 16 if row.lora is True else int(row.lora)


def is_of_attention(row: Row) -> bool:
    """Whether a row's adapters are those of attention alone."""
    return "lora of attention" in row.note.lower()


def training_of(row: Row) -> Training:
    """How a row's model is trained, a batch a step."""
    return Training(
        recipe=program_of(row).recipe,
        compiled=row.compiled and program_of(row).compiled,
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
    return pieces_of(choices, few.at, one.keeps)


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
    pieces = launched(pieces, row)
    if row.mesh.get("pp", 1) > 1:
        seconds, memory, idle = _pipeline(row, pieces, kinds, laid, layout, training)
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
        memory = held(whole, layout, replace(training, microbatches=row.steps))
    nbytes = memory.total
    if program_of(row).thrifty:  # a distributed optimizer gathers into what it stored
        nbytes -= memory.gradients // 2 + (memory.parameters if layout.shard > 1 else 0)
    return Said(_tokens(row, seconds), nbytes / 2**30, idle)


def launched(pieces: Pieces, row: Row) -> Pieces:
    """The pieces with what the host takes to start the products of experts."""
    each = program_of(row).launches
    ranks = row.mesh.get("ep", 1) * row.mesh.get("tp", 1)

    def slower(one: Profile) -> Profile:
        experts = max((weight.experts for weight in one.weights), default=0) / ranks
        forward, backward = one.forward, one.backward
        first, last = (each * experts / 3, 2 * each * experts / 3)
        return replace(
            one,
            forward=(forward[0] + first, *forward[1:]),
            backward=(backward[0] + last, *backward[1:]),
        )

    return replace(pieces, profiles={kind: slower(one) for kind, one in pieces.profiles.items()})


def _tokens(row: Row, seconds: float) -> float:
    return row.steps * row.batch * row.length / alike(row) / seconds


def alike(row: Row) -> int:
    """The ranks that have one batch."""
    axes = ("tp", "cp", "pp", *program_of(row).shared)
    return math.prod(row.mesh.get(axis, 1) for axis in axes)


def _pipeline(
    row: Row,
    pieces: Pieces,
    kinds: Sequence[str],
    machine: Machine,
    layout: Layout,
    training: Training,
) -> tuple[float, Footprint, float]:
    """Seconds of a step, memory of the largest rank, the part of the schedule that ranks wait."""
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
    took = {
        kind: pass_seconds(one, axes, machine.real_links) for kind, one in pieces.profiles.items()
    }
    units = [BEFORE, *kinds, AFTER]
    spans = cut_units(units, took, over, ranks * chunks, once)
    if spans is None:
        raise LookupError(f"{len(units)} pieces are no {ranks * chunks} stages")
    live = [kept_at_once(row.schedule, shape, rank) for rank in range(ranks)]
    stages = [
        pieces.joined(span, live[stage % ranks][stage // ranks]) for stage, span in enumerate(spans)
    ]
    forward, backward = (
        [sum(took[unit][which] for unit in span) + over for span in spans] for which in (0, 1)
    )
    times = timeline(row.schedule, once, forward, backward, chunks)
    one = Scheduled(
        parts=[joined(stages[rank::ranks]) for rank in range(ranks)],
        sent=((pieces.sent, 1),) * (len(spans) - 1),
        seconds=tuple(zip(forward, backward)),
        times=Duration(times.seconds, times.idle),
        stages=(),
        microbatches=once,
        order=(row.schedule, chunks),
    )
    costs = RankCosts(axes, machine, layout, training, once)
    _, memory, step, price = step_of(one, costs, 0.0)
    data = step.step - times.seconds - step.optimizer
    total = count / once * times.seconds + (1 - hidden) * data + step.optimizer
    return total, memory, times.idle


def proposed(row: Row, body: Mapping[str, Any], machine: Cluster) -> MeshSearch:
    """What `autoshard plan` proposes for a row's whole model, world and global batch, with the
    options that it takes so that one fits. Which layers are computed again, and what is kept of a
    weight, is the search's own choice."""
    few = few_layers(body, row.length, cut=False)
    model, args, kwargs = build(few, 1, row.length, "none", lora_of(row), is_of_attention(row))

    return search_meshes(
        model,
        args,
        kwargs,
        world=row.world,
        hardware=of_program(machine, row),
        training=training_of(row),
        global_batch=samples_of(row),
        otherwise=partial(roomier, {}),
    )


def samples_of(row: Row) -> int:
    """The global batch of a row."""
    return row.steps * row.batch * row.world // alike(row)


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
