"""A job that loses processes and goes on: from its last checkpoint, on the mesh of those there are.

    torchrun --standalone --nproc-per-node 4 --max-restarts 3 examples/elastic.py --folder saved

    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nnodes 1:4 --nproc-per-node 2 \\
        --max-restarts 3 --rdzv-backend c10d --rdzv-endpoint HOST:29400 examples/elastic.py ...

torchrun starts all processes again when one ends, and when a node joins or is gone. Each start asks
how many processes there are, makes a mesh of them, has the model planned for it, and loads the last
checkpoint that is whole: torch.distributed.checkpoint moves it from the mesh that it was saved on.
Checkpoints are written while training goes on (`async_save`); steps since the last one are lost.
Several nodes read and write one folder, and need the variable: without it torchrun keeps one store
for all starts, in which the new processes would meet the addresses of those that have ended.
"""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from transformers import LlamaConfig, LlamaForCausalLM

import autoshard

BATCH = 8  # sequences a step, however many processes share them


def main() -> None:
    args = arguments()
    mesh = mesh_of(int(os.environ["WORLD_SIZE"]))
    options = {"mesh": mesh, "inner": args.inner}
    torch.manual_seed(0)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    autoshard.shard(model, kwargs=batch_of(0, mesh, 0), **options)  # starts the process group too
    rank = dist.get_rank()
    writing = dist.new_group(backend="gloo")  # what is written meanwhile has collectives of its own
    step, saving = resume(model, optimizer, args.folder), None
    if rank == 0:
        print(f"{mesh}, from step {step}", flush=True)
    compiled = torch.compile(model, backend="autoshard", options=options)
    while step < args.steps:
        loss = compiled(**batch_of(step, mesh, rank)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % args.every == 0:
            if saving is not None:
                saving.result()  # the one before is whole, or has failed
            state = state_of(model, optimizer)
            where = args.folder / f"{step:08}"
            saving = dcp.async_save(state, checkpoint_id=where, process_group=writing)
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        if rank == 0:
            with (args.folder / "losses.txt").open("a") as file:
                file.write(f"{step - 1} {float(mean)!r}\n")
    if saving is not None:
        saving.result()


def mesh_of(processes: int) -> dict[str, int]:
    """The axes for so many processes: pairs split each layer, and the pairs share the batch."""
    tp = 2 if processes % 2 == 0 else 1
    return {"dp_shard": processes // tp, "tp": tp}


def batch_of(step: int, mesh: dict[str, int], rank: int) -> dict[str, torch.Tensor]:
    """The rank's part of the batch of a step, which is the same on every mesh."""
    draw = torch.Generator().manual_seed(step)
    whole = torch.randint(64, (BATCH, 16), generator=draw)
    own = whole.chunk(mesh["dp_shard"])[rank // mesh["tp"]]
    return {"input_ids": own, "labels": own}


def make_model() -> LlamaForCausalLM:
    """The same weights in every process."""
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What a checkpoint holds: DTensors, of which each rank writes its part."""
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments}


def resume(model: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> int:
    """The step to go on with, after loading the last checkpoint that is whole."""
    found: list[Any] = [None]
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        whole = sorted(path.parent.name for path in folder.glob("*/.metadata"))
        found = whole[-1:] or [None]
        for path in folder.glob("0*"):  # those that a killed job had begun, and old ones
            if path.name not in whole[-2:]:
                shutil.rmtree(path)
    dist.broadcast_object_list(found)
    if found[0] is None:
        return 0
    state = state_of(model, optimizer)
    dcp.load(state, checkpoint_id=folder / found[0])
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    return int(found[0])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, help="of checkpoints and losses.txt")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--every", type=int, default=5, help="steps from a checkpoint to the next")
    parser.add_argument(
        "--inner",
        choices=["inductor", "aot_eager", "eager"],
        default="inductor",
        help="what compiles a rank's program (default inductor)",
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
