"""Rows of published runs in the words of their file, their machines, and what their trainers do.

What a trainer does and its rows do not say is its program's (`PROGRAMS`): a few properties for all
rows of a source, never of one row.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from autoshard.planning.cost import Cluster, cluster
from autoshard.planning.cost.machines import RowExchange

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


def rows_of(body: Mapping[str, Any]) -> list[tuple[Row, str]]:
    """The rows of a file, each with the reason why it cannot be asked, "" where it can: a word that
    is not known would be passed over in silence."""
    known = {one.name for one in fields(Row)}
    found = []
    for run in body["runs"]:
        words = ", ".join(sorted(set(run) - known))
        row = Row(**{word: value for word, value in run.items() if word in known})
        found.append((row, f"unknown words: {words}" if words else ""))
    return found


@dataclass(frozen=True, kw_only=True)
class Program:
    """What a trainer does on every run.

    recipe: as in Training. reduced: as in `precision`. fused: products of tp beside their
    collectives. rows: how rows travel to experts. overlapped: compute hides transfers of pp, and
    the parameters' beside it, but for what the machine's `overlap` leaves. thrifty: as in `Keeps`,
    and gradients are kept in two bytes. shares: of `Efficiency`, by what its kernels get other
    parts of the data sheet than those that the machine was fitted to. launches: seconds that the
    host takes for each expert of a mixture that a rank holds, forward and backward together.
    compiled: as in Training. shared: axes whose ranks have one batch, beside tp, cp and pp.
    """

    recipe: str = "mixed"
    reduced: str = "float32"
    fused: bool = False
    rows: RowExchange = RowExchange()
    overlapped: bool = False
    thrifty: bool = False
    launches: float = 0.0
    compiled: bool = True
    shared: tuple[str, ...] = ()
    shares: Mapping[str, float] = field(default_factory=dict)


MEGATRON = Program(
    recipe="master",
    rows=RowExchange(deduplicated=True, overlap=0.5),
    overlapped=True,
    thrifty=True,
    launches=0.4e-3,
    shares={"compute": 1.2, "attention": 1.7},
)
PROGRAMS: dict[str, Program] = {
    "titan": Program(),
    "automodel": Program(recipe="pure", reduced="bfloat16", rows=RowExchange(True, 0.0)),
    "trl-moe": Program(recipe="pure", reduced="bfloat16", compiled=False, shared=("ep",)),
    "trl-1m": Program(recipe="pure", reduced="bfloat16", shares={"attention": 2.3}),
    "gpu-recipes": Program(overlapped=True),
    "nnscaler": Program(),
    "mbridge": MEGATRON,
    "nemo": MEGATRON,
    "mlperf": MEGATRON,
}
NATURAL = 1.2
"""Rows of the busiest rank by the mean's, where a router chooses as it was trained to."""

ROWWISE, FLOAT4_SHARE = 0.55, 0.6
"""Of float8's part of the data sheet: products with a scale for each row, and those of nvfp4."""


CONSTANTS = {
    **{f"Megatron's {name}": part for name, part in MEGATRON.shares.items()},
    "TRL's attention": PROGRAMS["trl-1m"].shares["attention"],
    "Megatron's seconds of launches an expert": MEGATRON.launches,
    "Megatron's overlap of rows": MEGATRON.rows.overlap,
    **{"natural imbalance": NATURAL, "rowwise": ROWWISE, "nvfp4": FLOAT4_SHARE},
    **{"b200's float8": 0.7, "mi300x's and mi355x's compute": 0.5},
}
"""What was fitted to the given rows, beside the efficiencies of the built-in machines."""


def program_of(row: Row) -> Program:
    """The program of a row's source, with what the row says is different."""
    found = next((one for name, one in PROGRAMS.items() if row.source.startswith(name)), Program())
    note = row.note.lower()
    if re.search("all-?to-?all", note):
        hidden = found.rows.overlap if "overlap" in note else 0.0
        found = replace(found, rows=RowExchange(overlap=hidden))
    if row.async_tp:
        found = replace(found, fused=True)
    given = {"recipe": row.recipe, "reduced": row.reduced}
    return replace(found, **{name: value for name, value in given.items() if value})


def machine_of(name: str, machines: Mapping[str, Any]) -> Cluster:
    """A machine of a file: built in, or described beside this file, with what the file says."""
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
    if isinstance(row.float8, str):
        part = ROWWISE if "rowwise" in row.float8 else FLOAT4_SHARE if "fp4" in row.float8 else 1.0
        share = replace(share, float8=share.float8 * part)
    given = {name: getattr(share, name) * part for name, part in program.shares.items()}
    return replace(machine, device=device, efficiency=replace(share, **given), rows=program.rows)
