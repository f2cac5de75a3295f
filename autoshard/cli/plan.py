"""`autoshard plan MODEL --world N`: will it fit, on which mesh, and how fast; without a GPU."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoshard.cli.arguments import (
    batch_size,
    options_and_entries,
    shared_arguments,
    world_size,
)
from autoshard.cli.progress import ProgressLine
from autoshard.errors import AutoshardError, message

if TYPE_CHECKING:
    from autoshard.mesh_search import MeshPrice, MeshSearch
    from autoshard.planning import Recomputation

_AXES = ("tp", "cp", "ep", "dp_shard", "dp_replicate")


def add_command(commands: Any) -> None:
    """Add `plan` to the subparsers of the command line."""
    shared = shared_arguments(
        mesh=None, batch=1, sequence=4096, dtype="bfloat16", hardware=None, option=[]
    )
    parser: argparse.ArgumentParser = commands.add_parser(
        "plan",
        parents=[shared],
        help="the best mesh for a cluster: memory, communication, step time",
        description="--batch is that of one data-parallel rank, --mesh the only one to price, and "
        "--hardware may be a .yaml or .json file: a cluster of your own.",
    )
    parser.add_argument("--world", type=world_size, required=True, help="number of ranks (devices)")
    parser.add_argument(
        "--recipe",
        default="pure",
        help="what is kept in which dtype; pure: all in --dtype (default); mixed: float32 "
        "parameters, gradients and moments; master: --dtype parameters, float32 gradients, moments "
        "and master copy",
    )
    parser.add_argument("--optimizer", default="adamw", help="adamw (default), momentum or sgd")
    parser.add_argument(
        "--microbatches",
        type=batch_size,
        default=1,
        help="batches of a data-parallel rank whose gradients make one step (default 1)",
    )
    parser.add_argument(
        "--checkpointing",
        choices=("none", "full", "selective"),
        default="none",
        help="activation checkpointing of each layer; none (default): as the model has it; "
        "selective: attention and every second product are kept",
    )
    parser.add_argument(
        "--float8",
        action="store_true",
        help="products of activations with weights in float8, but the last",
    )
    parser.add_argument(
        "--uncompiled",
        action="store_true",
        help="operators run one by one, each through memory",
    )
    parser.add_argument("--out", type=Path, help="write the recommended plan to this file")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Search, print, and write the plan; AutoshardError where --out is asked and nothing fits."""
    import torch

    from autoshard.cli.checkpointing import checkpoint_layers
    from autoshard.mesh_search import search_meshes
    from autoshard.model_source import load_on_meta
    from autoshard.planning.cost import DEFAULT_HARDWARE
    from autoshard.planning.estimate import Training

    options, entries = options_and_entries(arguments.model, arguments.option)
    training = Training(
        arguments.optimizer,
        arguments.recipe,
        microbatches=arguments.microbatches,
        compiled=not arguments.uncompiled,
        float8=arguments.float8,
    )
    dtype = getattr(torch, arguments.dtype)
    call = load_on_meta(arguments.model, arguments.batch, arguments.sequence, dtype, entries)
    checkpoint_layers(call.model, arguments.checkpointing)
    found = search_meshes(
        call.model,
        call.args,
        call.kwargs,
        world=arguments.world,
        hardware=DEFAULT_HARDWARE if arguments.hardware is None else arguments.hardware,
        mesh=arguments.mesh,
        training=training,
        progress=ProgressLine(),
        **options,
    )
    if arguments.json:
        print(json.dumps(as_json(found), indent=1))
    else:
        count = sum(p.numel() for p in call.model.parameters())
        cluster = found.cluster
        named = "".join(f", {name} {value}" for name, value in options.items())
        print(
            f"{type(call.model).__name__}: {count / 1e9:.3g} B parameters, {arguments.world} x "
            f"{cluster.name} ({cluster.per_node} a node, {cluster.device.memory_bytes / 1e9:.0f} "
            f"GB each), {arguments.batch} x {arguments.sequence} tokens a data-parallel rank, "
            f"{arguments.dtype} {arguments.recipe}, {arguments.optimizer}{named}\n"
        )
        print(text(found, call.tokens and call.tokens * arguments.microbatches))
    best = found.best
    if best is None:
        if arguments.out:
            raise AutoshardError(message("no mesh fits, so no plan was written", remedy=_MORE))
        return
    if arguments.out:
        best.plan.save(arguments.out)
        if best.recomputation is None:
            options.pop("memory_budget", None)  # it chose the mesh, which the plan holds
        else:
            options.setdefault("memory_budget", found.cluster.usable_bytes)
        used = {"plan": str(arguments.out), **options}
        print(
            f"wrote {arguments.out}: options={used}",
            file=sys.stderr if arguments.json else sys.stdout,
        )


_MORE = "Use more ranks, a smaller batch, or devices with more memory."


def text(found: MeshSearch, tokens: int | None = None) -> str:
    """The table for a terminal or a pipe: what fits, best first; the others with the reason.

    tokens: in the batch of one data-parallel rank, where it is known.
    """
    from autoshard.explain import table

    used = [axis for axis in _AXES if any(axis in row.timing.traffic for row in found.rows)]
    kinds = ["params", "grads", "optim", "activ", "buckets", "total"]
    again = any(row.recomputation for row in found.rows)
    extra = ["recomputed"] if again else []
    header = ["", "mesh", "step", "exposed", "MFU", *kinds, *extra, *used]
    cells = [_cells(row, row is found.best, used, again) for row in found.rows]
    told = "; recomputed: GB that are not kept, and ms that it takes" if again else ""
    lines = [
        "step and exposed communication in ms; MFU in %; a rank's memory in GB; on each axis, GB "
        f"that a rank sends and ms{told}\n",
        table(header, cells, right=range(2, len(header))),
    ]
    unfit = [row for row in found.rows if not row.fits]
    if unfit:
        lines += ["", "x does not fit:"]
        lines += [f"  {spell(row.mesh)}: {row.unfit}" for row in unfit]
    best = found.best
    if best is None:
        lines += ["", f"nothing fits. {_MORE}"]
    else:
        batches = found.world // (best.mesh.get("tp", 1) * best.mesh.get("cp", 1))
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


def _recomputed(row: MeshPrice) -> str:
    one = row.recomputation
    return f"{short(one.spared / 1e9)}, {short(1e3 * one.seconds)}" if one else "-"


def _cells(row: MeshPrice, best: bool, axes: list[str], again: bool) -> list[str]:
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
        *([_recomputed(row)] if again else []),
        *(f"{short(one.nbytes / 1e9)}, {short(1e3 * one.seconds)}" if one else "-" for one in sent),
    ]


def short(number: float) -> str:
    """Three digits, or all of those before the point: 0.905, 4.41, 1346."""
    return f"{number:.3g}" if abs(number) < 1000 else f"{number:.0f}"


def _as_json(one: Recomputation | None) -> dict[str, Any] | None:
    if one is None:
        return None
    return {
        "spared_bytes": one.spared,
        "kept_bytes": one.kept,
        "seconds": one.seconds,
        "least_seconds": one.bound,
    }


def as_json(found: MeshSearch) -> dict[str, Any]:
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
                "recomputation": _as_json(row.recomputation),
            }
        )
    return {
        "world": found.world,
        "hardware": found.cluster.name,
        "recommended": found.best.mesh if found.best else None,
        "rows": rows,
    }
