"""A training step of a mixture of experts on two gloo processes, beside transformers and FSDP2.

    torchrun --nproc-per-node=2 benchmarks/experts.py [--experts 8] [--chosen 2] [--json PATH]

A small Qwen3-MoE, on the same global batch for all, taking turns step by step: this backend on `ep`
(each rank has half of the batch, experts stay, rows travel), on `tp` (the planner chooses how each
mixture is split) and on `dp_shard`; transformers' expert parallelism, which its DistributedConfig
turns on, of a batch for each rank (FSDP2 for all but the experts) and of one batch for both; and
FSDP2, which gathers the experts. Rivals run eagerly and, FSDP2 only, under torch.compile, layer by
layer: transformers' exchange reads its counts on the host, where a compiled layer breaks. Time,
peak and bytes are measured as in data_parallel.py; ratios are to the best of the rival of the same
kind.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from autoshard.verification.comparison import furthest
from data_parallel import Contestant, Measured, figures, race, report


class WithLoss(nn.Module):
    """The loss of a language model that predicts its input."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=ids, labels=ids, use_cache=False).loss


def configuration(args: argparse.Namespace) -> Any:
    """The model's."""
    return transformers.Qwen3MoeConfig(
        hidden_size=args.hidden,
        moe_intermediate_size=args.inner,
        intermediate_size=args.inner,
        num_hidden_layers=args.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=args.hidden // 4,
        num_experts=args.experts,
        num_experts_per_tok=args.chosen,
        norm_topk_prob=True,
        vocab_size=args.vocab,
    )


def own_part(call: Callable[..., Any]) -> Callable[..., Any]:
    """`call` on this rank's part of the batch."""
    return lambda ids: call(ids.chunk(dist.get_world_size())[dist.get_rank()])


def contestants(model: nn.Module, directory: str) -> dict[str, Callable[[], Contestant]]:
    """How to make each of them, by name. directory: where the model is saved."""
    n = dist.get_world_size()

    def ours(axis: str, rival: str) -> Contestant:
        own = WithLoss(copy.deepcopy(model))
        call = torch.compile(own, backend="autoshard", options={"mesh": {axis: n}})
        return Contestant(own, call if axis == "tp" else own_part(call), rival)

    def theirs(shared: bool) -> Contestant:
        sizes = {"tp_size": n if shared else 1, "fsdp_size": 1 if shared else n, "ep_size": n}
        layout = transformers.distributed.DistributedConfig(**sizes)
        read = transformers.AutoModelForCausalLM.from_pretrained
        own = WithLoss(read(directory, distributed_config=layout, dtype=torch.float32).train())
        return Contestant(own, own if shared else own_part(own), "HF one" if shared else "HF")

    def fsdp(compiled: bool) -> Contestant:
        own = WithLoss(copy.deepcopy(model))
        mesh = init_device_mesh("cpu", (n,))
        for layer in own.model.model.layers:
            if compiled:
                layer.compile()
            fully_shard(layer, mesh=mesh)
        wrapped: Any = fully_shard(own, mesh=mesh)
        return Contestant(wrapped, own_part(wrapped), "FSDP2")

    return {
        "autoshard ep": lambda: ours("ep", "HF"),
        "autoshard tp": lambda: ours("tp", "HF one"),
        "autoshard FSDP": lambda: ours("dp_shard", "FSDP2"),
        "HF eager": lambda: theirs(False),
        "HF one eager": lambda: theirs(True),
        "FSDP2 eager": lambda: fsdp(False),
        "FSDP2 compiled": lambda: fsdp(True),
    }


def main() -> None:
    """Run all contestants and print the table on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--inner", type=int, default=256)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--chosen", type=int, default=2)
    parser.add_argument("--vocab", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--only", nargs="*", help="names of contestants")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    warnings.filterwarnings("ignore")
    model = transformers.Qwen3MoeForCausalLM(configuration(args))
    names = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(names)
    if dist.get_rank() == 0:
        model.save_pretrained(names[0])
    dist.barrier()

    def batch() -> torch.Tensor:
        return torch.randint(args.vocab, (args.batch, args.length))

    measured: dict[str, Measured] = {}
    losses: dict[str, float] = {}
    for name, make in contestants(model, names[0]).items():
        if args.only and name not in args.only:
            continue
        one = measured[name] = Measured(make())
        torch.manual_seed(1)
        loss = one.contestant.call(batch())
        found = loss.detach().clone()
        dist.all_reduce(found)
        losses[name] = float(found) / dist.get_world_size()
        loss.backward()
        one.contestant.module.zero_grad()
        if dist.get_rank() == 0:
            print(f"{name}: loss {losses[name]:.6f}", flush=True)
    first = next(iter(losses.values()))
    if furthest(abs(loss - first) for loss in losses.values()) > 1e-3:
        raise SystemExit(f"the contestants compute different losses: {losses}")
    race(measured, args.steps, batch)
    rows = figures(measured)
    if dist.get_rank() == 0:
        report(rows, args)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
