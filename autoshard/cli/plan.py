"""`autoshard plan MODEL --world N`: will it fit, on which mesh, and how fast; without a GPU."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from autoshard.cli.arguments import (
    ProgressLine,
    assumed,
    batch_size,
    imbalance,
    options_and_entries,
    roomier,
    shared_arguments,
    with_fields,
    world_size,
)
from autoshard.errors import AutoshardError, ConfigError

if TYPE_CHECKING:
    from autoshard.mesh_search import MeshPrice, MeshSearch, PipelinePrice
    from autoshard.planning import Plan, Recomputation
    from autoshard.planning.estimate import HostUpdate

_PLAIN = "mesh fits unfit mfu microbatches batch refused gap chunked_losses".split()
_AXES = ("tp", "cp", "ep", "dp_shard", "dp_replicate", "pp")


def add_command(commands: Any) -> None:
    """Add `plan` to the subparsers of the command line."""
    shared = shared_arguments(
        mesh=None, batch=None, sequence=4096, dtype="bfloat16", hardware=None, option=[]
    )
    parser: argparse.ArgumentParser = commands.add_parser(
        "plan",
        parents=[shared],
        help="the best mesh for a cluster: memory, communication, step time",
        description="--batch is that of one data-parallel rank (default 1), --mesh the only one to "
        "price, and --hardware may be a .yaml or .json file: a cluster of your own.",
    )
    parser.add_argument("--world", type=world_size, required=True, help="number of ranks (devices)")
    parser.add_argument(
        "--recipe",
        default="pure",
        help="what is kept in which dtype; pure: all in --dtype (default); mixed: float32 "
        "parameters, gradients and moments; master: --dtype parameters, float32 gradients, moments "
        "and master copy",
    )
    parser.add_argument(
        "--optimizer",
        default="adamw",
        help="adamw (default), momentum, sgd; another of torch.optim, as muon, or module:Class",
    )
    parser.add_argument(
        "--optimizer-states",
        choices=("device", "host"),
        help="where its states are, and the master copies of --recipe master; host: as "
        "autoshard.offload_optimizer keeps them (default: device)",
    )
    parser.add_argument(
        "--microbatches",
        type=batch_size,
        help="batches of a data-parallel rank whose gradients make one step (default 1); of a "
        "pipeline, for each of its stages",
    )
    whole = "sequences of a step of all ranks; the best micro-batch of each mesh is found"
    parser.add_argument("--global-batch", type=batch_size, help=whole)
    parser.add_argument(
        "--checkpointing",
        choices=("none", "full", "selective"),
        default="none",
        help="activation checkpointing of each layer; none (default): as the model has it; "
        "selective: attention and every second product are kept",
    )
    float8 = "products of activations with weights in float8, but the last"
    parser.add_argument("--float8", action="store_true", help=float8)
    apart = "operators run one by one, each through memory"
    parser.add_argument("--uncompiled", action="store_true", help=apart)
    fullest = "rows of the fullest rank of ep by those of the mean (default 1: experts are even)"
    parser.add_argument("--imbalance", type=imbalance, default=1.0, help=fullest)
    parser.add_argument("--out", type=Path, help="write the recommended plan to this file")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Search, print, and write the plan; AutoshardError where --out is asked and nothing fits."""
    import torch

    from autoshard.mesh_search import search_meshes
    from autoshard.model_source import checkpoint_layers, load_on_meta
    from autoshard.planning.cost import DEFAULT_HARDWARE
    from autoshard.planning.estimate import Training

    if arguments.global_batch and (arguments.batch or arguments.microbatches):
        remedy = "Leave them out: they are found."
        raise ConfigError("--global-batch beside --batch or --microbatches", remedy=remedy)
    arguments.batch = arguments.batch or 1
    options, entries = options_and_entries(arguments.model, arguments.option)
    if arguments.optimizer_states:
        options = with_fields(options, optimizer_states=arguments.optimizer_states)
    training = Training(
        arguments.optimizer,
        arguments.recipe,
        microbatches=arguments.microbatches or 1,
        compiled=not arguments.uncompiled,
        float8=arguments.float8,
        imbalance=arguments.imbalance,
    )
    dtype = getattr(torch, arguments.dtype)
    call = load_on_meta(arguments.model, arguments.batch, arguments.sequence, dtype, entries)
    checkpoint_layers(call.model, arguments.checkpointing)
    asked: dict[str, Any] = {"world": arguments.world, "mesh": arguments.mesh, "training": training}
    asked["hardware"] = DEFAULT_HARDWARE if arguments.hardware is None else arguments.hardware
    asked["global_batch"] = arguments.global_batch

    asked |= {"progress": ProgressLine(), "otherwise": partial(roomier, options)}
    found = search_meshes(call.model, call.args, call.kwargs, **asked, **options)
    options = found.options
    if arguments.json:
        used = {"memory": options.get("memory", {})}  # given, or taken where nothing fits otherwise
        print(json.dumps({**as_json(found), **used}, indent=1))
    else:
        count = sum(p.numel() for p in call.model.parameters())
        cluster = found.cluster
        named = "".join(f", {name} {value}" for name, value in options.items())
        print(
            f"{type(call.model).__name__}: {count / 1e9:.3g} B parameters, {arguments.world} x "
            f"{cluster.name} ({cluster.per_node} a node, {cluster.device.memory_bytes / 1e9:.0f} "
            f"GB each), {arguments.global_batch or arguments.batch} x {arguments.sequence} tokens "
            f"a {'step' if arguments.global_batch else 'data-parallel rank'}, "
            f"{arguments.dtype} {arguments.recipe}, {arguments.optimizer}{named}"
            f"{assumed(found, arguments.imbalance)}\n"
        )
        print(text(found, call.tokens))
    if arguments.out:
        told = sys.stderr if arguments.json else sys.stdout
        _save(found, arguments.out, options, told, lambda row: _staged(row, found, arguments))


def _staged(row: MeshPrice, found: MeshSearch, arguments: argparse.Namespace) -> Plan:
    """The plan of a mesh with pp, whose stages are those of its batch in micro-batches."""
    import torch

    from autoshard.model_source import checkpoint_layers, load_on_meta
    from autoshard.tracing import trace

    options, entries = options_and_entries(arguments.model, arguments.option)
    if row.recomputation is None:  # stages that fit as they are need no count
        options = with_fields(options, memory_budget=None)
    if row.pipeline and row.pipeline.order[0] == "interleaved":
        schedule, stages = row.pipeline.order
        options = with_fields(options, schedule=schedule, virtual_stages=stages)
    dtype, samples = getattr(torch, arguments.dtype), arguments.batch
    samples *= row.microbatches * (row.batch or 1)
    call = load_on_meta(arguments.model, samples, arguments.sequence, dtype, entries)
    checkpoint_layers(call.model, arguments.checkpointing)
    traced = trace(
        call.model,
        call.args,
        call.kwargs,
        mesh=row.mesh,
        hardware=found.cluster,
        **with_fields(options, microbatches=row.microbatches),
    )
    return dataclasses.replace(traced.plan, mesh=dict(row.mesh))


def _save(
    found: MeshSearch,
    path: Path,
    options: dict[str, Any],
    told: TextIO,
    staged: Callable[[MeshPrice], Plan],
) -> None:
    """Write the plan of the recommended mesh. staged: makes that of one with pp."""
    saved = found.best
    if saved is None:
        raise AutoshardError("no mesh fits, so no plan was written", remedy=_MORE)
    (staged(saved) if saved.pipeline else saved.plan).save(path)
    if saved.recomputation is None:  # a budget chose the mesh, which the plan holds
        options = with_fields(options, memory_budget=None)
    elif "budget" not in options.get("memory", {}):
        options = with_fields(options, memory_budget=found.cluster.usable_bytes)
    used = {"plan": str(path), **options}
    print(f"wrote {path}: options={used}", file=told)


_MORE = "Use more ranks, a smaller batch, or devices with more memory."


def text(found: MeshSearch, tokens: int | None = None) -> str:
    """The table for a terminal or a pipe: what fits, best first; the others with the reason.

    tokens: in one batch of a data-parallel rank, where it is known.
    """
    from autoshard.explain import table

    used = [axis for axis in _AXES if any(axis in row.timing.traffic for row in found.rows)]
    kinds = ["params", "grads", "optim", "activ", "buckets", "total"]
    again = any(row.recomputation for row in found.rows)
    sent = any(row.recomputation and row.recomputation.sent for row in found.rows)
    there = any(row.host_update for row in found.rows)
    owned = any(row.owned.matrices for row in found.rows)
    stages = any(row.pipeline for row in found.rows)
    extra = ["recomputed"] * again + ["on host"] * sent + ["states on host"] * there
    extra += ["owners"] * owned
    stages |= any(row.batch for row in found.rows)
    extra += ["batches, idle"] * stages
    header = ["", "mesh", "step", "exposed", "MFU", *kinds, *extra, *used]
    shown = [_recomputed] * again + [_on_host] * sent + [_states] * there
    shown += [_owners] * owned + [_idle] * stages
    cells = [_cells(row, row is found.best, used, shown) for row in found.rows]
    told = "; recomputed: GB that are not kept, and ms that it takes" if again else ""
    told += "; on host: GB kept there, and ms of their way there and back" if sent else ""
    told += "; states on host: GB there, and ms of the optimizer's step" if there else ""
    if owned:
        first = next(row.owned for row in found.rows if row.owned.matrices)
        told += (
            f"; owners: GB that all send for the step of {first.matrices} matrices, whose "
            f"{short(first.flops / 1e9)} Gflop are computed once, and ms of the rank with most"
        )
    if stages:
        told += (
            "; batches of a rank in a step; with pp: of the stage that holds most (x stages of a "
            "rank), and how many % of the schedule stages wait"
        )
    units = "step and exposed communication in ms; MFU in %; a rank's memory in GB; on each axis, "
    units += f"GB that a rank sends and ms{told}\n"
    lines = [units, table(header, cells, right=range(2, len(header)))]
    unfit = [row for row in found.rows if not row.fits]
    if unfit:
        lines += ["", "x does not fit:"]
        lines += [f"  {spell(row.mesh)}: {row.unfit}" for row in unfit]
    if loose := [row for row in found.rows if row.gap]:
        lines += ["", "of all plans of cp and tp, by the planner's cost there may be cheaper ones:"]
        lines += [f"  {spell(row.mesh)}: by at most {row.gap:.1%}" for row in loose]
    if chunked := [row for row in found.rows if row.chunked_losses]:
        lines += ["", f"losses by chunks of rows: {', '.join(spell(row.mesh) for row in chunked)}"]
    refused = [row for row in found.rows if row.refused]
    if refused:
        meshes = ", ".join(spell(row.mesh) for row in refused)
        lines += ["", f"- does not run yet: {meshes}. {refused[0].refused}"]
    best = found.best
    if best is None:
        lines += ["", f"nothing fits. {_MORE}"]
    else:
        alike = best.mesh.get("tp", 1) * best.mesh.get("cp", 1) * best.mesh.get("pp", 1)
        batches = best.microbatches * (best.batch or 1) * found.world // alike
        rate = f", {tokens * batches / best.timing.step:,.0f} tokens/s" if tokens else ""
        rate += f", micro-batches of {best.batch}" if best.batch else ""
        lines += [
            "",
            f"* recommended: {spell(best.mesh)}: {short(1e3 * best.timing.step)} ms a step, "
            f"{best.memory.total / 1e9:.3g} GB a rank, {100 * best.mfu:.1f}% MFU{rate}",
        ]
        lines += [f"  {found.reason()}"] * bool(found.reason())
    return "\n".join(line.rstrip() for line in lines)


def spell(mesh: dict[str, int]) -> str:
    """{"dp_shard": 8, "tp": 8} -> `dp_shard=8 tp=8`."""
    return " ".join(f"{name}={size}" for name, size in mesh.items())


def _recomputed(row: MeshPrice) -> str:
    one = row.recomputation
    return f"{short(one.spared / 1e9)}, {short(1e3 * one.seconds)}" if one else "-"


def _idle(row: MeshPrice) -> str:
    one, count = row.pipeline, f"{row.microbatches}{f' of {row.batch}' if row.batch else ''}"
    if one is None:
        return count if row.batch else "-"
    stages = f" x {one.order[1]}" if one.order[1] > 1 else ""
    return f"{count}{stages}, {100 * one.idle:.0f}"


def _on_host(row: MeshPrice) -> str:
    one = row.recomputation
    return f"{short(one.host / 1e9)}, {short(1e3 * one.transfers)}" if one and one.sent else "-"


def _states(row: MeshPrice) -> str:
    one = row.host_update
    return f"{short(one.nbytes / 1e9)}, {short(1e3 * one.seconds)}" if one else "-"


def _owners(row: MeshPrice) -> str:
    one = row.owned
    return f"{short(one.sent / 1e9)}, {short(1e3 * one.seconds)}" if one.matrices else "-"


def _cells(
    row: MeshPrice, best: bool, axes: list[str], shown: Sequence[Callable[[MeshPrice], str]]
) -> list[str]:
    held, took = row.memory, row.timing
    kinds = (held.parameters, held.gradients, held.optimizer, held.activations, held.buckets)
    sent = [took.traffic.get(axis) for axis in axes]
    return [
        "*" if best else "x" if not row.fits else "-" if row.refused else "",
        spell(row.mesh),
        short(1e3 * took.step),
        short(1e3 * took.exposed),
        f"{100 * row.mfu:.1f}",
        *(short(kind / 1e9) for kind in (*kinds, held.total)),
        *(one(row) for one in shown),
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
        "host_bytes": one.host,
        "transfer_seconds": one.transfers,
    }


def _host_as_json(one: HostUpdate) -> dict[str, Any]:
    return {
        "host_bytes": one.nbytes,
        "seconds": one.seconds,
        "read_seconds": one.reads,
        "step_seconds": one.work,
        "write_seconds": one.writes,
    }


def _stages_as_json(one: PipelinePrice) -> dict[str, Any]:
    chunks = len(one.seconds) // len(one.memory)
    stages = zip(one.seconds, one.memory * chunks, [*one.sent_bytes, 0])
    return {
        "idle": one.idle,
        "schedule": one.order[0],
        "stages_of_a_rank": one.order[1],
        "stages": [
            {
                "forward_seconds": forward,
                "backward_seconds": backward,
                "memory_bytes": held.total,
                "sent_bytes": sent,
            }
            for (forward, backward), held, sent in stages
        ],
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
                **{name: getattr(row, name) for name in _PLAIN},
                "memory_bytes": memory,
                "seconds": took,
                "recomputation": _as_json(row.recomputation),
                "host_update": row.host_update and _host_as_json(row.host_update),
                "owned": row.owned._asdict(),
                "pipeline": row.pipeline and _stages_as_json(row.pipeline),
            }
        )
    return {
        "world": found.world,
        "hardware": found.cluster.name,
        "recommended": found.best.mesh if found.best else None,
        "reason": found.reason(),
        "rows": rows,
    }
