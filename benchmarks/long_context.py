"""A training step on one long sequence, on two gloo processes: `cp` beside what is written by hand.

    torchrun --nproc-per-node=2 benchmarks/long_context.py [--length 2048] [--json PATH]
    torchrun --nproc-per-node=2 benchmarks/long_context.py --packed 8192 16384 32768 [--budget 5000]

The contestants, on the same sequence, taking turns step by step: this backend on `cp` and on `tp`
with sequence parallelism; Ulysses by hand, that is the sequence cut among the ranks, all-to-alls of
heads around attention, targets shifted before they are cut, and FSDP2 for the weights; and
`parallelize_module` with sequence parallelism, the last two in eager code and under torch.compile.
Time, peak and bytes are measured as in data_parallel.py; ratios are to the best of Ulysses by hand.
`fits` is the longest sequence, in tokens, whose step peaks at `--memory-mb`: the line through the
peaks at the whole and at half of the length, which are linear in it (no contestant holds S x S).
torch's own `context_parallel` is not among them: its attention has CUDA kernels only.

With `--packed`, a Gemma 3 on `cp` alone, with AdamW, on one row of five documents: its loss and the
furthest gradient from those of the documents one by one, serial and eager, and the measured
(live_storages.py) beside the predicted peak. `--budget`: bytes a token that a
rank may hold, with a loss by chunks and as much of the host's memory.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import autoshard
from autoshard.verification.comparison import difference, furthest, norm
from data_parallel import Contestant, Measured, figures, race, report
from live_storages import LiveStorages, measure_step
from llama_model import Attention, Llama, Shape, WithLoss
from training import by_hand


class Exchange(torch.autograd.Function):
    """All-to-all of equal parts: dim `split` is divided among the ranks, dim `cat` made whole."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, split: int, cat: int) -> torch.Tensor:
        ctx.dims = cat, split
        parts = [part.contiguous() for part in x.chunk(dist.get_world_size(), split)]
        received = [torch.empty_like(part) for part in parts]
        dist.all_to_all(received, parts)
        return torch.cat(received, cat)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return Exchange.apply(gradient, *ctx.dims), None, None


class UlyssesAttention(nn.Module):
    """The attention of a block on a part of the sequence, whose heads are exchanged."""

    def __init__(self, inner: Attention) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        q, k, v = (Exchange.apply(t, 1, 2) for t in self.inner.heads(x, cos, sin))
        y = Exchange.apply(F.scaled_dot_product_attention(q, k, v, is_causal=True), 2, 1)
        return self.inner.o(y.transpose(1, 2).flatten(-2))


class Ulysses(nn.Module):
    """The model on this rank's part of the sequence; its loss is this rank's part of the mean,
    times the number of ranks, over which FSDP2 averages the gradients."""

    def __init__(self, model: Llama, length: int) -> None:
        super().__init__()
        self.model = model
        rank, n = dist.get_rank(), dist.get_world_size()
        self.part, self.length, self.ranks = (
            slice(rank * length // n, (rank + 1) * length // n),
            length,
            n,
        )
        model.cos, model.sin = model.cos[self.part], model.sin[self.part]
        for block in model.blocks:
            block.attention = UlyssesAttention(block.attention)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        targets = F.pad(ids[:, 1:], (0, 1), value=-100)[:, self.part]
        logits = self.model(ids[:, self.part])
        total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        return total / (self.length - 1) * self.ranks


def ulysses(model: Llama, length: int, compiled: bool) -> Contestant:
    """The hand-written form; block by block under torch.compile, as FSDP2 asks."""
    own = Ulysses(copy.deepcopy(model), length)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in own.model.blocks:
        if compiled:
            block.compile(dynamic=False)
        fully_shard(block, mesh=mesh)
    wrapped: Any = fully_shard(own, mesh=mesh)
    return Contestant(wrapped, wrapped, "Ulysses")


def contestants(model: Llama, length: int) -> dict[str, Callable[[], Contestant]]:
    """How to make each of them, by name; each has a copy of the model.

    `dynamic=False`: Dynamo remembers lengths past `torch.compiler.reset()`, and programs of two
    lengths would be one of a fixed length and one of symbolic ones.
    """

    def ours(**options: Any) -> Contestant:
        own = WithLoss(copy.deepcopy(model))
        call = torch.compile(own, backend="autoshard", dynamic=False, options=options)
        return Contestant(own, call, "Ulysses")

    def tensor_parallel(compiled: bool) -> Contestant:
        return by_hand(model, True, compiled)._replace(rival="Ulysses")

    n = dist.get_world_size()
    return {
        "autoshard cp": lambda: ours(mesh={"cp": n}),
        "autoshard tp": lambda: ours(mesh={"tp": n}, planner={"sequence_parallel": True}),
        "Ulysses eager": lambda: ulysses(model, length, False),
        "Ulysses compiled": lambda: ulysses(model, length, True),
        "TP+SP eager": lambda: tensor_parallel(False),
        "TP+SP compiled": lambda: tensor_parallel(True),
    }


def longest(measured: dict[str, Measured], shape: Shape, memory: int) -> dict[str, float]:
    """Tokens of the longest sequence of each contestant whose step peaks at `memory` bytes."""
    half = dataclasses.replace(shape, length=shape.length // 2)
    torch.manual_seed(0)
    model = Llama(half)
    found = {}
    # compiled before eager: torch 2.13 does not compile TP by hand again once it ran in eager code
    for name, make in reversed(contestants(model, half.length).items()):
        torch.compiler.reset()
        short = Measured(make())
        race({name: short}, 0, lambda: torch.randint(half.vocab, (1, half.length)))
        slope = (measured[name].peak - short.peak) / (shape.length - half.length)
        if slope <= 0:
            raise SystemExit(f"{name}: weights peak, not activations: give a longer --length")
        found[name] = shape.length + (memory - measured[name].peak) / slope
    return found


def gemma3(length: int) -> nn.Module:
    """A Gemma 3 of one layer with a window and one without, whose keys have one head."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    sizes = {"hidden_size": 64, "intermediate_size": 256, "vocab_size": 1024, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 1, "query_pre_attn_scalar": 16}
    kinds = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 512}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False}
    config = Gemma3TextConfig(
        **sizes, **heads, **kinds, **tokens, num_hidden_layers=2, max_position_embeddings=length
    )
    model = Gemma3ForCausalLM(config)
    model.loss_type = "ForCausalLM"  # else a warning breaks the graph before the loss
    return model


def packed(length: int, budget: int) -> dict[str, float]:
    """A step on one row of five documents, `length` tokens in all. budget: bytes; 0: none."""
    torch.compiler.reset()
    torch.manual_seed(0)
    serial, ids, live = gemma3(length), torch.randint(3, 1024, (1, length)), LiveStorages()
    starts = [0, length // 2, length * 5 // 8, length * 11 // 16 + 5, length * 3 // 4 + 17]
    documents = [slice(*ends) for ends in zip(starts, [*starts[1:], length])]
    labels = ids.clone()
    labels[:, starts] = -100
    at = torch.cat([torch.arange(one.stop - one.start) for one in documents])[None]
    batch = {"input_ids": ids, "labels": labels, "position_ids": at}
    own = copy.deepcopy(serial)
    options: dict[str, Any] = {"mesh": {"cp": dist.get_world_size()}, "inner": "aot_eager"}
    if budget:
        options["memory"] = {"budget": budget, "host": budget, "chunk_loss": True}
    call = torch.compile(own, backend="autoshard", dynamic=False, options=options)
    still = torch.optim.AdamW(own.parameters(), lr=0.0, weight_decay=0.0)
    try:
        measured = measure_step(live, own, lambda: call(**batch).loss, still)
    finally:
        live.restore()
    memory = autoshard.programs(own)[-1].memory()
    loss = call(**batch).loss
    loss.backward()
    off = [0.0]
    for one in documents if dist.get_rank() == 0 else ():
        tokens = (one.stop - one.start - 1) / (length - len(documents))
        part = tokens * serial(input_ids=ids[:, one], labels=labels[:, one]).loss
        part.backward()
        loss = loss.detach() - part.detach()
    for mine, its in zip(own.parameters(), serial.parameters(), strict=True):
        gradient = mine.grad.full_tensor() if isinstance(mine.grad, DTensor) else mine.grad
        if its.grad is not None:
            off.append(norm(difference(gradient, its.grad)) / norm(its.grad))
    return {
        "tokens": length,
        "budget": budget,
        "measured": measured["peak"],
        "predicted": memory.peak,
        "host": live.on_host,
        "loss_off": abs(float(loss)),
        "gradients_off": furthest(off),
    }


def packed_rows(lengths: list[int], budget: int, path: Path | None) -> None:
    """Print the figures of `--packed` on rank 0. budget: bytes a token; 0: none."""
    rows = []
    for length in lengths:
        row = packed(length, budget * length)
        rows.append(row)
        ratio = row["predicted"] / row["measured"] - 1
        each = row["measured"] * dist.get_world_size() / length
        if dist.get_rank() == 0:
            print(
                f"{length:,} tokens, {row['budget'] / 1e6:.1f} MB allowed: "
                f"peak {row['measured'] / 1e6:.1f} MB, {each:,.0f} bytes a token of a rank, "
                f"predicted {row['predicted'] / 1e6:.1f} ({ratio:+.2%}); to the host "
                f"{row['host'] / 1e6:.1f}; loss off by {row['loss_off']:.1e}, "
                f"gradients by {row['gradients_off']:.1e}",
                flush=True,
            )
    if path and dist.get_rank() == 0:
        path.write_text(json.dumps(rows, indent=2) + "\n")


def main() -> None:
    """Run all contestants and print the table on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--memory-mb", type=float, default=1000.0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--packed", type=int, nargs="+", help="tokens of the rows")
    parser.add_argument("--budget", type=int, default=0, help="bytes a token, of --packed")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    if args.packed:
        packed_rows(args.packed, args.budget, args.json)
        dist.destroy_process_group()
        return
    torch.manual_seed(0)
    shape = Shape(layers=args.layers, length=args.length)
    measured: dict[str, Measured] = {}
    losses: dict[str, float] = {}
    for name, make in contestants(Llama(shape), args.length).items():
        one = measured[name] = Measured(make())
        torch.manual_seed(1)
        ids = torch.randint(shape.vocab, (1, shape.length))
        loss = one.contestant.call(ids)
        value = getattr(loss, "loss", loss).detach()
        found = value.full_tensor() if hasattr(value, "full_tensor") else value.clone()
        if name.startswith("Ulysses"):  # a part each
            dist.all_reduce(found)
            found /= dist.get_world_size()
        losses[name] = float(found)
        loss.backward()
        one.contestant.module.zero_grad()
        if dist.get_rank() == 0:
            print(f"{name}: loss {losses[name]:.6f}", flush=True)
    first = next(iter(losses.values()))
    if furthest(abs(loss - first) for loss in losses.values()) > 1e-3:
        raise SystemExit(f"the contestants compute different losses: {losses}")
    race(measured, args.steps, lambda: torch.randint(shape.vocab, (1, shape.length)))
    rows = figures(measured)
    tokens = longest(measured, shape, int(args.memory_mb * 1e6))
    for name, row in rows.items():
        row["fits"] = tokens[name]
        row["fits_ratio"] = tokens[name] / max(tokens["Ulysses eager"], tokens["Ulysses compiled"])
    if dist.get_rank() == 0:
        report(rows, args)
        print(f"\n{f'in {args.memory_mb:g} MB':18}{'fits':>12}{'ratio':>7}")
        for name, row in rows.items():
            print(f"{name:18}{row['fits']:12,.0f}{row['fits_ratio']:7.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
