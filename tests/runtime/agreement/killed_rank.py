"""A training script for torchrun: checkpoints every step, and one rank kills itself on request.

    torchrun --nproc-per-node 2 killed_rank.py FOLDER STEPS [KILL_AT]

Continues from the last complete checkpoint in FOLDER. Rank 0 writes the loss of each step to
FOLDER/losses.txt; a rank that ends with an error writes it to FOLDER/error.RANK.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from joined_batch import part
from models import CASES

LIMIT = 20.0  # seconds: the time limit of the process group


def main(folder: Path, steps: int, kill_at: int | None) -> None:
    """Train the case "mlp" with ZeRO-3."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=LIMIT))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    case = CASES["mlp"]
    model = case.make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    options = {"mesh": {"dp_shard": ranks}, "inner": "aot_eager"}
    compiled = torch.compile(model, backend="autoshard", options=options)
    first = 0
    done = sorted(int(path.parent.name) for path in folder.glob("*/.metadata"))
    if done:
        # the first call stores the parameters; then there is something to load into
        case.loss(compiled, part(case.make_batch(0), ranks, rank))
        weights, moments = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optim": moments}, checkpoint_id=folder / str(done[-1]))
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
        first = done[-1] + 1
    for step in range(first, steps):
        loss = case.loss(compiled, part(case.make_batch(step), ranks, rank))
        if step == kill_at and rank == ranks - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / ranks
        dist.all_reduce(mean)
        if rank == 0:
            with (folder / "losses.txt").open("a") as file:
                file.write(f"{step} {float(mean)!r}\n")
        weights, moments = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optim": moments}, checkpoint_id=folder / str(step))
    dist.destroy_process_group()


if __name__ == "__main__":
    where, count, *kill = sys.argv[1:]
    started = time.monotonic()
    try:
        main(Path(where), int(count), int(kill[0]) if kill else None)
    except BaseException as error:
        text = f"{time.monotonic() - started:.1f} {type(error).__name__}: {error}"
        (Path(where) / f"error.{os.environ['RANK']}").write_text(text)
        raise
