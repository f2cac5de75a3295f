"""Peak memory of a training step: what `Program.memory()` says beside what is measured.

    torchrun --nproc-per-node=2 benchmarks/memory.py [--model llama] [--mesh tp] [--json FILE]

Runs a Llama and a GPT-2 with AdamW on every mesh of two ranks: DDP, ZeRO-1 to 3 and tp, with
AOTAutograd's graphs run operator by operator and with Inductor. Measured are the tensors alive in
the second step, by weak references to their storages (live_storages.py); not the batch, and not
scratch space inside an operator. MB are millions of bytes, of rank 0. Ratios are predicted over
measured: of the peak, and of the most in each phase.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import autoshard
from live_storages import LiveStorages, measure_step

KINDS = ("parameters", "gradients", "optimizer", "activations", "gathered", "temporaries")
PHASES = {"forward": "forward", "backward": "backward", "optimizer": "update"}


def llama(width: int, layers: int, vocab: int) -> nn.Module:
    """A decoder with rotary embedding and gated MLP."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=width,
            intermediate_size=4 * width,
            num_hidden_layers=layers,
            num_attention_heads=4,
            vocab_size=vocab,
            use_cache=False,
        )
    )


def gpt2(width: int, layers: int, vocab: int) -> nn.Module:
    """A decoder with learned positions, biases and a tied head."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": width, "n_layer": layers, "n_head": 4, "vocab_size": vocab}
    no_tokens = {"bos_token_id": None, "eos_token_id": None}  # its own lie outside of `vocab`
    config = GPT2Config(**sizes, **no_tokens, n_positions=1024, use_cache=False)
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # else a warning breaks the graph before the loss
    return model


MODELS: dict[str, Callable[[int, int, int], nn.Module]] = {"llama": llama, "gpt2": gpt2}
MESHES: dict[str, dict[str, Any]] = {
    "DDP": {"mesh": {"dp_replicate": 2}},
    "ZeRO-1": {"mesh": {"dp_shard": 2}, "zero": 1},
    "ZeRO-2": {"mesh": {"dp_shard": 2}, "zero": 2},
    "ZeRO-3": {"mesh": {"dp_shard": 2}, "zero": 3},
    "tp": {"mesh": {"tp": 2}},
}


def row(name: str, mesh: str, inner: str, args: argparse.Namespace) -> dict[str, Any]:
    """One model on one mesh: bytes measured and predicted."""
    torch.compiler.reset()
    torch.manual_seed(0)
    live = LiveStorages()
    model = MODELS[name](args.width, args.layers, args.vocab).eval()
    ids = torch.randint(args.vocab, (args.batch, args.sequence))
    optimizer = torch.optim.AdamW(model.parameters())
    options = {**MESHES[mesh], "inner": inner, "planner": {"bucket_bytes": args.bucket_bytes}}
    compiled = torch.compile(model, backend="autoshard", options=options)
    try:
        measured = measure_step(
            live, model, lambda: compiled(input_ids=ids, labels=ids).loss, optimizer
        )
    finally:
        live.restore()
    program = autoshard.programs(model)[-1]
    memory, moments = program.memory(), program.memory_timeline()
    predicted = {kind: getattr(memory, kind) for kind in (*KINDS, "peak")}
    for ours, theirs in PHASES.items():
        predicted[theirs] = max(m.bytes for m in moments if m.phase == ours)
    return {
        "model": name,
        "mesh": mesh,
        "inner": inner,
        "measured": measured,
        "predicted": predicted,
        "ratio": predicted["peak"] / measured["peak"],
        "ratios": {phase: predicted[phase] / measured[phase] for phase in PHASES.values()},
    }


def main() -> None:
    """Measure all and print the table on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--bucket-bytes", type=int, default=4 << 20)
    parser.add_argument("--model", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--mesh", nargs="+", default=list(MESHES), choices=list(MESHES))
    parser.add_argument("--inner", nargs="+", default=["aot_eager", "inductor"])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rows = []
    for name in args.model:
        for mesh in args.mesh:
            for inner in args.inner:
                rows.append(row(name, mesh, inner, args))
    if dist.get_rank() == 0:
        print(f"{'MB':18} {'inner':10} {'measured':>9} {'predicted':>9} {'ratio':>6}", end="")
        print("".join(f" {phase:>8}" for phase in PHASES.values()), end="")
        print("".join(f" {kind:>11}" for kind in KINDS))
        for one in rows:
            peaks = one["measured"]["peak"], one["predicted"]["peak"]
            label = f"{one['model']} {one['mesh']}"
            print(f"{label:18} {one['inner']:10}", end="")
            print(f" {peaks[0] / 1e6:9.2f} {peaks[1] / 1e6:9.2f} {one['ratio']:6.3f}", end="")
            print("".join(f" {ratio:8.3f}" for ratio in one["ratios"].values()), end="")
            print("".join(f" {one['predicted'][kind] / 1e6:11.2f}" for kind in KINDS))
        if args.json:
            args.json.write_text(json.dumps(rows, indent=2) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
