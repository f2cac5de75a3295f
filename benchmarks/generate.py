"""Tokens of a Llama on two processes, beside Hugging Face's tensor parallelism and serial.

    torchrun --nproc-per-node=2 benchmarks/generate.py [--device cuda] [--tokens 128] [--json PATH]

The same weights, prompt and greedy decoding for each: this backend (Inductor), Hugging Face's
`tp_plan="auto"` in eager code and under torch.compile, and the serial model on one thread. `first`
is the time to the first token and `tokens/s` that of the others, once everything is compiled: the
contestants take turns, each prints the best of its rounds. `first call` compiles. Tokens that are
not serial's are an error. Below the table stand the collectives of this backend's decode step.

One process decodes serial in eager code, under torch.compile, and with this backend, which on one
rank is torch.compile. On CUDA everything is in bf16, and tokens may differ from serial's in the
order of sums, which is said.

`--static` gives all of them a static cache, `--dynamic` compiles ours for any length from the
start, which makes two programs in place of three.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.distributed import DistributedConfig

from autoshard import programs
from data_parallel import start

VOCABULARY = 4096
OURS = "autoshard tp"


def contestants(folder: str, dynamic: bool, device: torch.device) -> dict[str, Callable[[], Any]]:
    """How to make each model, by name."""
    n = dist.get_world_size()
    kept = {"dtype": torch.bfloat16 if device.type == "cuda" else torch.float32}

    def serial(compiled: bool = False) -> Any:
        model = LlamaForCausalLM.from_pretrained(folder, **kept).to(device).eval()
        if compiled:
            model.compile()
        return model

    def ours() -> Any:
        model = serial()
        options = {"mesh": {"tp": n}, "outputs": "sharded"}
        model.compile(backend="autoshard", options=options, dynamic=dynamic or None)
        return model

    def theirs(compiled: bool) -> Any:
        plan = DistributedConfig(tp_plan="auto")
        model = LlamaForCausalLM.from_pretrained(folder, distributed_config=plan, **kept).eval()
        if compiled:
            model.compile()
        return model

    if n == 1:
        return {"serial": serial, OURS: ours, "serial, compiled": lambda: serial(True)}
    return {
        "serial, one thread": serial,
        OURS: ours,
        "tp_plan, eager": lambda: theirs(False),
        "tp_plan, compiled": lambda: theirs(True),
    }


def generate(
    model: Any, ids: torch.Tensor, tokens: int, cache: str | None
) -> tuple[float, torch.Tensor]:
    """Seconds, and the tokens. cache: transformers' `cache_implementation`."""
    dist.barrier()
    started = time.perf_counter()
    found = model.generate(
        ids,
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=False,
        pad_token_id=0,
        disable_compile=True,
        cache_implementation=cache,
    )
    if ids.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - started, found


def main() -> None:
    """Run all contestants and print the table on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--static", action="store_true", help="a static cache")
    parser.add_argument("--dynamic", action="store_true", help="compile ours for any length")
    parser.add_argument(
        "--only", default="", help="contestants whose name has this in it, and serial"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    cache = "static" if args.static else None
    device = start(args.device)
    rank = dist.get_rank()
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=args.width,
        intermediate_size=args.width * 11 // 4,
        num_hidden_layers=args.layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        max_position_embeddings=args.prompt + args.tokens,
    )
    places = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(places)
    if rank == 0:
        LlamaForCausalLM(config).save_pretrained(places[0])
    dist.barrier()
    ids = torch.randint(VOCABULARY, (1, args.prompt), generator=torch.Generator().manual_seed(1))
    ids = ids.to(device)
    models: dict[str, Any] = {}
    rows: dict[str, dict[str, float]] = {}
    wanted: torch.Tensor | None = None
    for name, make in contestants(places[0], args.dynamic, device).items():
        if args.only not in name and wanted is not None:
            continue
        models[name] = make()
        took, found = generate(models[name], ids, args.tokens, cache)
        wanted = found if wanted is None else wanted
        if not torch.equal(found, wanted):
            same = int((found == wanted).long().cumprod(1).sum()) - args.prompt
            said = f"{name}: tokens are serial's up to the {same}th"
            if device.type == "cpu":
                raise SystemExit(said)
            print(said, flush=True)
        rows[name] = {"first_call_s": took, "first_s": float("inf"), "all_s": float("inf")}
        if rank == 0:
            print(f"{name}: first call {took:.1f} s", flush=True)
    for _ in range(args.rounds):
        for name, model in models.items():
            row = rows[name]
            row["first_s"] = min(row["first_s"], generate(model, ids, 1, cache)[0])
            row["all_s"] = min(row["all_s"], generate(model, ids, args.tokens, cache)[0])
    for row in rows.values():
        row["tokens_per_s"] = (args.tokens - 1) / (row["all_s"] - row["first_s"])
    if rank == 0:
        print(f"\n{'':20}first call s   first s  tokens/s")
        for name, row in rows.items():
            figures = (
                f"{row['first_call_s']:12.1f}{row['first_s']:10.2f}{row['tokens_per_s']:10.1f}"
            )
            print(f"{name:20}{figures}")
        if OURS in models and dist.get_world_size() > 1:
            made = programs(models[OURS])
            step = Counter(one.op for one in made[-1].collectives())
            moved = sum(one.bytes for one in made[-1].collectives())
            counted = ", ".join(f"{n} {op}" for op, n in step.items())
            print(
                f"\n{len(made)} programs; a decode step has {counted}, of {moved:,} bytes in all,"
            )
            print("and the exchange of each rank's likeliest token")
        if args.json is not None:
            args.json.write_text(json.dumps(rows, indent=2))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
