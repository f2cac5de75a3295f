"""`autoshard compile MODEL --mesh dp_shard=8,tp=8 --out DIR`: before a job, what its ranks load.

One process is each rank whose program is its own, beside ranks that are not there: it plans, and
takes one training step, whose collectives return at once.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoshard.cli.arguments import ProgressLine, options_and_entries, shared_arguments
from autoshard.cli.verify import source_of

if TYPE_CHECKING:
    from autoshard.program import Program
    from autoshard.verification import Subject


def add_command(commands: Any) -> None:
    """Add `compile` to the subparsers of the command line."""
    shared = shared_arguments(mesh=..., batch=8, sequence=32, dtype=None, option=[])
    parser: argparse.ArgumentParser = commands.add_parser(
        "compile",
        parents=[shared],
        help="plan and compile before the job; its ranks load that",
        description="--batch is that of one data-parallel rank. Runs on the kind of machine that "
        "the job runs on, and holds the whole model. The job gives the folder as its plan.",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="is made")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Compile and write."""
    import torch

    from autoshard.compiling import is_for_any_rank
    from autoshard.errors import ConfigError
    from autoshard.planning import PLAN_FILE
    from autoshard.runtime.agreement import AHEAD
    from autoshard.verification import Subject

    options, entries = options_and_entries(arguments.model, arguments.option)
    folder, size = arguments.out, math.prod(arguments.mesh.values())
    if arguments.mesh.get("pp", 1) > 1:
        raise ConfigError("stages of a pipeline are not compiled ahead", remedy="Leave pp out.")
    dtype = None if arguments.dtype is None else getattr(torch, arguments.dtype)
    subject, say = Subject(source=source_of(arguments, entries), dtype=dtype), ProgressLine()
    options = {**options, "mesh": arguments.mesh}
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o755)
    say("plan", 1, 2)
    programs = step(subject, 0, size, {**options, "inner": "eager"})
    dataclasses.replace(programs[0].plan, mesh=arguments.mesh).save(folder / PLAN_FILE)
    alike = all(is_for_any_rank(one.graph_module) and not one.fusing(False) for one in programs)
    ranks = 1 if alike else size
    with AHEAD.making(folder):
        for rank in range(ranks):
            say(f"compile rank {rank}", 2 + rank, 1 + ranks)
            step(subject, rank, size, {**options, "plan": folder})
    print(f"wrote {folder}: options={ {**options, 'plan': str(folder)} }")


def step(subject: Subject, rank: int, size: int, options: dict[str, Any]) -> list[Program]:
    """The programs of a training step of one rank, of a job whose other ranks are not there."""
    import torch
    import torch.distributed as dist
    from torch.utils import _pytree as pytree

    from autoshard.program import programs

    dist.init_process_group("fake", rank=rank, world_size=size)
    try:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        model, *batch = subject.load()
        args, kwargs = pytree.tree_map_only(torch.Tensor, lambda t: t.to(device), batch)
        call = torch.compile(model.to(device), backend="autoshard", options=options)
        loss = subject.loss_of(call(*args, **kwargs))
        if loss.requires_grad:
            loss.backward()
        return programs(model)
    finally:
        dist.destroy_process_group()
        torch.compiler.reset()
