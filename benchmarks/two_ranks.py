"""Two ranks, on one device if need be: is the sharded model the serial one, on each kind of mesh?

    torchrun --nproc-per-node=2 benchmarks/two_ranks.py [--device cuda] [--layers 8] [--json PATH]

Two steps of a small Llama with SGD on tp, tp with sequence parallelism, DDP and ZeRO-1 to 3,
beside the serial model in the same process: the largest error of the losses, and of the parameters
relative to how far the steps moved them. With as many devices as ranks the collectives are the
device's own (NCCL), else gloo's, through the host; graphs go through Inductor on CUDA, and on a CPU
as they are.
Of seven layers and more, which are equal, five are traced (docs/first_step.md).
Exit status 1 where a mesh differs or fails.
"""

from __future__ import annotations

import argparse
import copy
import json
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves, tree_map_only

import autoshard
from autoshard.runtime.parameters import unshard_parameter
from autoshard.verification.comparison import furthest
from llama_model import Llama, Shape, WithLoss

SHAPE = Shape(vocab=512, width=128, hidden=256, layers=2, heads=4, length=64)
MESHES: dict[str, dict[str, Any]] = {
    "tp": {"mesh": {"tp": 2}},
    "tp + sp": {"mesh": {"tp": 2}, "planner": {"sequence_parallel": True}},
    "cp": {"mesh": {"cp": 2}},
    "DDP": {"mesh": {"dp_replicate": 2}},
    "ZeRO-1": {"mesh": {"dp_shard": 2}, "zero": 1},
    "ZeRO-2": {"mesh": {"dp_shard": 2}, "zero": 2},
    "ZeRO-3": {"mesh": {"dp_shard": 2}, "zero": 3},
}
LIMIT = 1e-3
"""The largest error that counts as equal: float32 sums in other orders, on any device."""


OUT_OF_PLACE = (
    *("all_reduce", "all_gather_into_tensor", "all_gather_into_tensor_coalesced"),
    *("reduce_scatter_tensor", "all_to_all_single", "broadcast"),
)


def send_through_the_host() -> torch.library.Library:
    """Let collectives of graphs copy to the host and back, for ranks of one device: gloo gathers of
    CUDA tensors are a segmentation fault (pytorch/pytorch#152645)."""
    c10d = torch.ops._c10d_functional
    library = torch.library.Library("_c10d_functional", "IMPL")

    def staged(name: str) -> Any:
        def run(tensors: Any, *args: Any) -> Any:
            on_host = tree_map_only(torch.Tensor, torch.Tensor.cpu, tensors)
            made = getattr(c10d, name)(on_host, *args)
            device = tree_leaves(tensors)[0].device
            return tree_map_only(torch.Tensor, lambda x: c10d.wait_tensor(x).to(device), made)

        return run

    for name in OUT_OF_PLACE:
        library.impl(name, staged(name), "CUDA")
    reduce, gather = staged("all_reduce"), staged("all_gather_into_tensor")
    library.impl("all_reduce_", lambda x, *args: x.copy_(reduce(x, *args)), "CUDA")
    library.impl(
        "all_gather_into_tensor_out", lambda x, *args, out: out.copy_(gather(x, *args)), "CUDA"
    )
    return library


def train(model: torch.nn.Module, call: Any, batches: list[torch.Tensor]) -> list[float]:
    """The losses of a step a batch."""
    losses = []
    optimizer = None
    for batch in batches:
        loss = call(batch)
        loss.backward()
        optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def row(options: dict[str, Any], device: str, shape: Shape) -> dict[str, float]:
    """The errors of one mesh."""
    torch.manual_seed(0)
    torch.compiler.reset()
    with torch.device(device):
        first = WithLoss(Llama(shape))
        batches = [torch.randint(shape.vocab, (4, shape.length)) for _ in range(2)]
    serial, sharded = copy.deepcopy(first), copy.deepcopy(first)
    expected = train(serial, serial, batches)
    one_batch = options["mesh"].keys() & {"tp", "cp"}
    own = batches if one_batch else [b.chunk(2)[dist.get_rank()] for b in batches]
    losses = torch.tensor(
        train(sharded, torch.compile(sharded, backend="autoshard", options=options), own)
    )
    if not one_batch:  # the mean of the ranks' means is the batch's
        dist.all_reduce(losses)
        losses /= 2
    before = dict(first.named_parameters())
    worst = 0.0
    for (name, wanted), found in zip(serial.named_parameters(), sharded.parameters(), strict=True):
        moved = (wanted - before[name]).norm().item()
        error = (unshard_parameter(found).detach() - wanted).norm().item()
        worst = furthest([worst, error / max(moved, 1e-12)])
    return {
        "loss_error": float((losses - torch.tensor(expected)).abs().max()),
        "parameter_error": worst,
    }


def main() -> int:
    """Compare and print on rank 0; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--layers", type=int, default=SHAPE.layers)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    shared = args.device == "cpu" or torch.cuda.device_count() < 2
    if args.device == "cuda":
        torch.cuda.set_device(0 if shared else dist.get_node_local_rank())
    dist.init_process_group("gloo" if shared else "cpu:gloo,cuda:nccl")
    library = send_through_the_host() if shared and args.device == "cuda" else None
    torch.set_num_threads(1)
    shape = replace(SHAPE, layers=args.layers)
    rows: dict[str, dict[str, Any]] = {}
    for name, options in MESHES.items():
        try:
            inner = {} if args.device == "cuda" else {"inner": "aot_eager"}
            found: dict[str, Any] = row({**options, **inner}, args.device, shape)
            found["equal"] = furthest(found.values()) < LIMIT
            said = (
                f"loss {found['loss_error']:.1e}, parameters {found['parameter_error']:.1e}, "
                f"{'equal' if found['equal'] else 'DIFFERENT'}"
            )
        except (autoshard.AutoshardError, RuntimeError) as error:
            found = {"equal": False, "failed": "".join(traceback.format_exception(error)[-3:])}
            said = f"failed: {str(error).splitlines()[0]}"
        rows[name] = found
        if dist.get_rank() == 0:
            print(f"{name:8} {said}", flush=True)
        if "failed" in found:  # what the other rank still waits for, nobody knows
            break
    if dist.get_rank() == 0 and args.json:
        args.json.write_text(json.dumps(rows, indent=2) + "\n")
    failed = not all(found["equal"] for found in rows.values())
    if not failed:
        dist.destroy_process_group()
    del library
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
