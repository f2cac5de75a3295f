"""Train a Hugging Face Llama sharded over all processes, beside the same model unsharded.

    torchrun --nproc-per-node 2 examples/train_llama.py

The model has 10.8 million randomly initialised parameters and a byte-level vocabulary; the text
is the source code of Python's standard library. Every process first trains the serial model, so
that each step of the sharded one can be printed beside it; the last line says whether the two
loss curves agree. Exit code 1 where they do not.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

import autoshard

RANK = int(os.environ.get("RANK", 0))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))
START_OF_FILE = 256
TOLERANCE = 1e-4  # relative difference of the losses; sums in another order round differently


def main() -> int:
    args = arguments()
    device = pick_device(args.device)
    text = standard_library(args.text_bytes)
    say(f"{WORLD_SIZE} processes on {device.type}, {len(text):,} bytes of text")

    serial_model = make_model().to(device)
    n = sum(p.numel() for p in serial_model.parameters())
    full_bytes = sum(p.nbytes for p in serial_model.parameters())
    say(f"Llama with {n / 1e6:.1f} M parameters, {full_bytes / 2**20:.1f} MiB\n")

    say("serial model, eager")
    serial: list[float] = []
    for loss, _ in train(serial_model, text, args, device):
        serial.append(loss)
        if len(serial) % 5 == 0 or len(serial) == args.steps:
            say(f"  {bar(len(serial), args.steps)} loss {loss:.4f}")
    del serial_model

    say(f"\nsharded model, inner={args.inner} (the first step captures, plans and compiles)")
    model = make_model().to(device)
    compiled = torch.compile(
        model, backend="autoshard", options={"mesh": {"tp": WORLD_SIZE}, "inner": args.inner}
    )
    sharded: list[float] = []
    for loss, seconds in train(compiled, text, args, device):
        step = len(sharded)
        sharded.append(loss)
        if step == 0:
            say(plan_summary(model, args.explain))
        difference = abs(loss - serial[step]) / abs(serial[step])
        say(
            f"  {bar(step + 1, args.steps)} loss {loss:.6f}  serial {serial[step]:.6f}  "
            f"relative difference {difference:.1e}  {seconds:.2f} s"
        )

    say("\nparameter bytes")
    for rank, nbytes in enumerate(gather(local_bytes(model))):
        share = 100 * nbytes / full_bytes
        say(f"  rank {rank}: {nbytes / 2**20:.1f} MiB, {share:.1f}% of the model")
    worst = max(gather(max(abs(a - b) / abs(b) for a, b in zip(sharded, serial))))
    agree = worst <= TOLERANCE
    say(
        f"\nThe loss curves {'agree' if agree else 'DO NOT AGREE'}: worst relative difference "
        f"{worst:.1e} over {args.steps} steps (tolerance {TOLERANCE:.0e})."
    )
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0 if agree else 1


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=25, help="optimizer steps (default 25)")
    parser.add_argument("--batch", type=int, default=4, help="sequences a step (default 4)")
    parser.add_argument("--length", type=int, default=128, help="bytes a sequence (default 128)")
    parser.add_argument(
        "--inner",
        choices=["inductor", "aot_eager", "eager"],
        default="inductor",
        help="what compiles a rank's program (default inductor)",
    )
    parser.add_argument(
        "--device",
        choices=["auto", "cpu", "cuda"],
        default="auto",
        help="auto: cuda where every process finds a GPU of its own, else cpu (default auto)",
    )
    parser.add_argument("--explain", action="store_true", help="print the whole plan")
    parser.add_argument(
        "--text-bytes", type=int, default=4 << 20, help="how much text to read (default 4 MiB)"
    )
    return parser.parse_args()


def pick_device(choice: str) -> torch.device:
    """One GPU a process, or the CPU."""
    if choice == "auto":
        choice = "cuda" if torch.cuda.device_count() >= WORLD_SIZE else "cpu"
    if choice == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    return torch.device(choice)


def standard_library(limit: int) -> torch.Tensor:
    """The standard library's source files as token ids, each file after a start token."""
    tokens: list[int] = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        tokens += [START_OF_FILE, *path.read_bytes()]
        if len(tokens) >= limit:
            break
    return torch.tensor(tokens[:limit])


def make_model() -> LlamaForCausalLM:
    """The same weights in every process and for both runs."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=260,  # 256 bytes, the start token, and a size that 2 and 4 ranks divide
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=8,
        max_position_embeddings=1024,
        use_cache=False,
        bos_token_id=START_OF_FILE,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config)


def train(
    model: torch.nn.Module, text: torch.Tensor, args: argparse.Namespace, device: torch.device
) -> Iterator[tuple[float, float]]:
    """Yield (loss, seconds) of each optimizer step; batches depend on the step only."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.2, total_iters=8)
    offsets = torch.arange(args.length)
    for step in range(args.steps):
        started = time.perf_counter()
        generator = torch.Generator().manual_seed(step)
        starts = torch.randint(len(text) - args.length, (args.batch, 1), generator=generator)
        batch = text[starts + offsets].to(device)
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        warmup.step()
        optimizer.zero_grad()
        yield loss.item(), time.perf_counter() - started


def plan_summary(model: torch.nn.Module, whole: bool) -> str:
    """How the planner laid out the model: the whole report, or repeated layers in one line."""
    programs = autoshard.programs(model)
    if not programs:
        return "  one process: nothing to shard"
    report = programs[-1].explain()
    if not whole:
        groups: dict[tuple[str, str], int] = {}
        for name, state in programs[-1].stored().items():
            key = re.sub(r"\.\d+\.", ".*.", name), state
            groups[key] = groups.get(key, 0) + 1
        width = max(len(name) for name, _ in groups)
        layout = [f"{n:>3} x {name:<{width}} {state}" for (name, state), n in groups.items()]
        collectives = re.findall(r"^\d+ collectives.*", report, re.MULTILINE)
        report = "\n".join([report.splitlines()[0], *layout, *collectives])
    return "\n" + "\n".join(f"  {line}".rstrip() for line in report.splitlines()) + "\n"


def local_bytes(model: torch.nn.Module) -> int:
    """Bytes of the parameters this process stores."""
    return sum((p.to_local() if isinstance(p, DTensor) else p).nbytes for p in model.parameters())


def gather(value: float) -> list[float]:
    """The value of every rank."""
    if not dist.is_initialized():
        return [value]
    values: list[float] = [0.0] * WORLD_SIZE
    dist.all_gather_object(values, value)
    return values


def bar(done: int, total: int, width: int = 20) -> str:
    """`step  3/25 [##------------------]`: a progress bar that is also readable in a log."""
    filled = width * done // total
    return f"step {done:>{len(str(total))}}/{total} [{'#' * filled}{'-' * (width - filled)}]"


def say(text: str) -> None:
    """Print once, at once."""
    if RANK == 0:
        print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
