"""`autoshard plan MODEL --world N`: will it fit, on which mesh, and how fast; without a GPU."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoshard.errors import ConfigError, message

if TYPE_CHECKING:
    from autoshard.mesh_search import Row, Search

_AXES = ("tp", "dp_shard", "dp_replicate")


def add(commands: Any) -> None:
    """Add the command to the subparsers of `autoshard`."""
    parser = commands.add_parser(
        "plan", help="the best mesh for a cluster: memory, communication, step time"
    )
    parser.add_argument(
        "model",
        help="a Hugging Face directory (only its config.json is read), a configuration class of "
        "transformers such as LlamaConfig, or module:factory",
    )
    parser.add_argument("--world", type=int, required=True, help="number of ranks (devices)")
    parser.add_argument(
        "--hardware",
        default="h100",
        help="a100, h100, h200, b200 (8 a node), cpu (2 processes), or a .yaml or .json file",
    )
    parser.add_argument(
        "--batch", type=int, default=1, help="sequences a data-parallel rank (default 1)"
    )
    parser.add_argument("--sequence", type=int, default=4096, help="tokens each (default 4096)")
    parser.add_argument("--mesh", help="only this one, such as dp_shard=8,tp=8")
    parser.add_argument("--zero", type=int, choices=(1, 2, 3), default=3)
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16"
    )
    parser.add_argument(
        "--precision",
        default="pure",
        help="pure: all in --dtype (default); mixed: float32 parameters, gradients and moments; "
        "master: --dtype parameters, float32 gradients, moments and master copy",
    )
    parser.add_argument("--optimizer", default="adamw", help="adamw (default), momentum or sgd")
    parser.add_argument("--memory-gb", type=float, help="device memory to fill at most")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="configuration entries"
    )
    parser.add_argument("--out", type=Path, help="write the recommended plan to this file")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Search, print, and write the plan; ConfigError where --out is asked and nothing fits."""
    import torch

    from autoshard.mesh_search import plan
    from autoshard.names import parse_mesh
    from autoshard.plan_source import load_source
    from autoshard.planning.estimate import Training

    for name in ("world", "batch", "sequence"):
        if getattr(options, name) < 1:
            raise ConfigError(message(f"--{name} {getattr(options, name)} is not positive"))
    training = Training(options.optimizer, options.precision)
    dtype = getattr(torch, options.dtype)
    source = load_source(options.model, options.batch, options.sequence, dtype, options.set)
    budget = None if options.memory_gb is None else int(options.memory_gb * 1e9)
    found = plan(
        source.model,
        source.args,
        source.kwargs,
        world=options.world,
        hardware=options.hardware,
        mesh=None if options.mesh is None else parse_mesh(options.mesh),
        training=training,
        progress=Bar(),
        zero=options.zero,
        memory_budget=budget,
    )
    if options.json:
        print(json.dumps(as_json(found), indent=1))
    else:
        count = sum(p.numel() for p in source.model.parameters())
        cluster = found.cluster
        print(
            f"{type(source.model).__name__}: {count / 1e9:.3g} B parameters, {options.world} x "
            f"{cluster.name} ({cluster.per_node} a node, {cluster.device.memory_bytes / 1e9:.0f} "
            f"GB each), {options.batch} x {options.sequence} tokens a data-parallel rank, "
            f"{options.dtype} {options.precision}, {options.optimizer}, zero {options.zero}\n"
        )
        print(text(found, source.tokens))
    best = found.best
    if best is None:
        if options.out:
            raise ConfigError(message("no mesh fits, so no plan was written", remedy=_MORE))
        return
    if options.out:
        best.plan.save(options.out)
        zero = "" if options.zero == 3 else f', "zero": {options.zero}'
        print(
            f'wrote {options.out}: options={{"plan": "{options.out}"{zero}}}',
            file=sys.stderr if options.json else sys.stdout,
        )


_MORE = "Use more ranks, a smaller batch, or devices with more memory."


def text(found: Search, tokens: int | None = None) -> str:
    """The table for a terminal or a pipe: what fits, best first; the others with the reason.

    tokens: in the batch of one data-parallel rank, where it is known.
    """
    from autoshard.explain import table

    used = [axis for axis in _AXES if any(axis in row.timing.traffic for row in found.rows)]
    kinds = ["params", "grads", "optim", "activ", "buckets", "total"]
    header = ["", "mesh", "step", "exposed", "MFU", *kinds, *used]
    cells = [_cells(row, row is found.best, used) for row in found.rows]
    for column in range(2, len(header)):
        width = max(len(cell[column]) for cell in [header, *cells])
        for cell in [header, *cells]:
            cell[column] = cell[column].rjust(width)
    lines = [
        "step and exposed communication in ms; MFU in %; a rank's memory in GB; on each axis, GB "
        "that a rank sends and ms\n",
        table(header, cells),
    ]
    unfit = [row for row in found.rows if not row.fits]
    if unfit:
        lines += ["", "x does not fit:"]
        lines += [f"  {spell(row.mesh)}: {row.unfit}" for row in unfit]
    best = found.best
    if best is None:
        lines += ["", f"nothing fits. {_MORE}"]
    else:
        batches = found.world // best.mesh.get("tp", 1)
        rate = f", {tokens * batches / best.timing.step:,.0f} tokens/s" if tokens else ""
        lines += [
            "",
            f"* recommended: {spell(best.mesh)}: {short(1e3 * best.timing.step)} ms a step, "
            f"{best.memory.total / 1e9:.3g} GB a rank, {100 * best.mfu:.1f}% MFU{rate}",
        ]
    return "\n".join(line.rstrip() for line in lines)


def spell(mesh: dict[str, int]) -> str:
    """{"dp_shard": 8, "tp": 8} -> `dp_shard=8 tp=8`."""
    return " ".join(f"{name}={size}" for name, size in mesh.items())


def _cells(row: Row, best: bool, axes: list[str]) -> list[str]:
    held, took = row.memory, row.timing
    kinds = (
        *(held.parameters, held.gradients, held.optimizer, held.activations, held.buckets),
        held.total,
    )
    sent = [took.traffic.get(axis) for axis in axes]
    return [
        "*" if best else "" if row.fits else "x",
        spell(row.mesh),
        short(1e3 * took.step),
        short(1e3 * took.exposed),
        f"{100 * row.mfu:.1f}",
        *(short(kind / 1e9) for kind in kinds),
        *(f"{short(one.nbytes / 1e9)}, {short(1e3 * one.seconds)}" if one else "-" for one in sent),
    ]


def short(number: float) -> str:
    """Three digits, or all of those before the point: 0.905, 4.41, 1346."""
    return f"{number:.3g}" if abs(number) < 1000 else f"{number:.0f}"


def as_json(found: Search) -> dict[str, Any]:
    """The search as data: bytes and seconds of one rank, in the order of the table."""
    rows = []
    for row in found.rows:
        took = dataclasses.asdict(row.timing)
        took["traffic"] = {name: one._asdict() for name, one in row.timing.traffic.items()}
        memory = {**dataclasses.asdict(row.memory), "total": row.memory.total}
        rows.append(
            {
                "mesh": row.mesh,
                "fits": row.fits,
                "unfit": row.unfit,
                "memory_bytes": memory,
                "seconds": took,
                "mfu": row.mfu,
            }
        )
    return {
        "world": found.world,
        "hardware": found.cluster.name,
        "recommended": found.best.mesh if found.best else None,
        "rows": rows,
    }


class Bar:
    """Progress on stderr: one bar on a terminal, a line for each step elsewhere."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()

    def __call__(self, what: str, done: int, total: int) -> None:
        if not self._terminal:
            if done < total:
                print(f"[{done + 1}/{total}] {what}", file=sys.stderr, flush=True)
            return
        filled = 30 * done // total
        bar = "#" * filled + "-" * (30 - filled)
        end = "\r\x1b[K" if done == total else ""
        print(f"\r\x1b[K[{bar}] {what}{end}", end="", file=sys.stderr, flush=True)
