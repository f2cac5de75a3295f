"""A training step of a Llama on two processes, beside what users would write by hand.

    torchrun --nproc-per-node=2 benchmarks/training.py [--device cuda] [--only tp] [--json PATH]

Tensor parallelism against `parallelize_module` plans (column, row and vocab-parallel; with and
without sequence parallelism) and data parallelism against DDP and FSDP2, each of torch's eager and
under torch.compile, in one run: the contestants take turns step by step, on the same global batch
(data-parallel ranks take half of it each). Step time, peak memory and bytes sent are measured as in
data_parallel.py; `first s` is the first step, compilation included. A ratio is to the best of
torch's two of the same kind; "FSDP2 kept" is FSDP2 with reshard_after_forward=False. On CUDA the
Llama has the width of a 1B shape, in bf16, and "async" is torch's own fusing of collectives with
products, under torch.compile.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._symmetric_memory import enable_symm_mem_for_group
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.parallel import DistributedDataParallel

from data_parallel import SETTLING, Contestant, Measured, figures, report, start
from llama_model import Llama, Shape, WithLoss, loss_of, parallelize_by_hand
from step_models import SHAPES


class InLossParallel:
    """A loss over logits that are split by vocabulary; its backward needs the context too."""

    def __init__(self, loss: torch.Tensor) -> None:
        self.loss = loss

    def backward(self) -> None:
        with loss_parallel():
            self.loss.backward()


def by_hand(model: Llama, sequence_parallel: bool, form: str) -> Contestant:
    """A `parallelize_module` plan with torch's vocab-parallel loss."""
    own = copy.deepcopy(model)
    mesh = init_device_mesh(_device_of(model), (dist.get_world_size(),))
    parallelize_by_hand(own, mesh, sequence_parallel)
    if form == "async":  # as torchtitan asks for it
        enable_symm_mem_for_group(mesh.get_group().group_name)
    options = {"_micro_pipeline_tp": True} if form == "async" else None
    run = own if form == "eager" else torch.compile(own, dynamic=False, options=options)

    def call(ids: torch.Tensor) -> InLossParallel:
        with loss_parallel():
            return InLossParallel(loss_of(run(ids), ids))

    return Contestant(own, call, "TP+SP by hand" if sequence_parallel else "TP by hand")


def _device_of(model: Llama) -> str:
    return next(model.parameters()).device.type


def contestants(model: Llama, only: str) -> dict[str, Callable[[], Contestant]]:
    """How to make each of them, by name; each has a copy of the model."""
    n = dist.get_world_size()

    def ours(rival: str, sizes: dict[str, int], **options: Any) -> Contestant:
        own = WithLoss(copy.deepcopy(model))
        options = {"mesh": sizes, **options}
        return Contestant(own, torch.compile(own, backend="autoshard", options=options), rival)

    def data_parallel(kind: str, compiled: bool) -> Contestant:
        own = copy.deepcopy(model)
        if kind == "DDP":
            wrapped: Any = DistributedDataParallel(WithLoss(own))
        else:
            mesh = init_device_mesh(_device_of(model), (n,))
            # compiled block by block: Dynamo breaks at FSDP2's hooks, between the blocks, and would
            # from then on leave the model's own forward eager, for every contestant
            reshard = kind == "FSDP2"
            for block in own.blocks:
                if compiled:
                    block.compile()
                fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
            wrapped = fully_shard(WithLoss(own), mesh=mesh, reshard_after_forward=reshard)
            return Contestant(wrapped, wrapped, kind)
        return Contestant(wrapped, torch.compile(wrapped) if compiled else wrapped, kind)

    found: dict[str, Callable[[], Contestant]] = {}
    if only in ("", "tp"):
        for rival, sequence in (("TP by hand", False), ("TP+SP by hand", True)):
            name = f"autoshard {'TP+SP' if sequence else 'TP'}"
            found[name] = lambda rival=rival, sequence=sequence: ours(
                rival, {"tp": n}, planner={"sequence_parallel": sequence}
            )
            fused = ("async",) if sequence and _device_of(model) == "cuda" else ()
            for kind in ("eager", "compiled", *fused):
                found[f"{rival} {kind}"] = lambda sequence=sequence, kind=kind: by_hand(
                    model, sequence, kind
                )
    if only in ("", "dp"):
        block = sum(p.numel() * p.element_size() for p in model.blocks[0].parameters())
        found["autoshard DDP"] = lambda: ours(
            "DDP", {"dp_replicate": n}, planner={"bucket_bytes": 25 << 20}
        )
        for zero in (1, 2, 3):
            found[f"autoshard ZeRO-{zero}"] = lambda zero=zero: ours(
                "FSDP2" if zero == 3 else "FSDP2 kept",
                {"dp_shard": n},
                zero=zero,
                planner={"bucket_bytes": block - 4096},
            )
        for kind in ("DDP", "FSDP2", "FSDP2 kept"):
            for form in ("eager", "compiled"):
                found[f"{kind} {form}"] = lambda kind=kind, form=form: data_parallel(
                    kind, form == "compiled"
                )
    return found


def main() -> None:
    """Run all contestants and print the table on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch", type=int, default=2, help="rows, over all ranks")
    parser.add_argument("--layers", type=int, default=Shape.layers)
    parser.add_argument("--only", choices=("tp", "dp"), default="")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device = start(args.device)
    rank, n = dist.get_rank(), dist.get_world_size()
    shape = replace(SHAPES["cuda"] if device.type == "cuda" else Shape(), layers=args.layers)
    with device:
        model = Llama(shape)
    if device.type == "cuda":
        model = model.to(torch.bfloat16)
    measured: dict[str, Measured] = {}
    first: dict[str, float] = {}

    def tokens() -> torch.Tensor:
        return torch.randint(shape.vocab, (args.batch, shape.length), device=device)

    def batch_for(one: Measured, ids: torch.Tensor) -> torch.Tensor:
        rival = one.contestant.rival
        return ids if rival.startswith("TP") else ids.chunk(n)[rank]

    for name, make in contestants(model, args.only).items():
        started = time.perf_counter()
        one = measured[name] = Measured(make())
        one.step(batch_for(one, tokens()))
        first[name] = time.perf_counter() - started
        if rank == 0:
            print(f"{name}: first step {first[name]:.1f} s", flush=True)
    for number in range(1, SETTLING + args.steps):
        ids = tokens()
        for one in measured.values():
            one.turn(number, batch_for(one, ids))
    rows = figures(measured)
    if rank == 0:
        for name, row in rows.items():
            row["first_s"] = first[name]
        parameters = sum(p.numel() for p in model.parameters())
        print(f"\n{parameters / 1e6:.1f} million parameters, {args.batch * shape.length} tokens")
        report(rows, args)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
