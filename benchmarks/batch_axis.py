"""What zero="auto" chooses under budgets, beside zero=3 and zero=2: predicted step and memory.

    python benchmarks/batch_axis.py [--layers 16] [--mesh dp_shard=16] [--budgets 14 17 20]

A Llama of 7B shape in bfloat16 on meta tensors, 1 x 4096 tokens a rank, on h100s: rows of
`autoshard plan`, as a Markdown table. Nothing runs. "again": milliseconds of recomputation.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import transformers

import autoshard


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--mesh", default="dp_shard=16")
    parser.add_argument("--budgets", type=float, nargs="+", default=[14, 17, 20])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    mesh = {name: int(n) for name, n in (one.split("=") for one in args.mesh.split(","))}
    with torch.device("meta"):
        config = transformers.LlamaConfig(num_hidden_layers=args.layers)
        model = transformers.LlamaForCausalLM(config).bfloat16()
        ids = torch.zeros(1, 4096, dtype=torch.long)
    print("| budget GB | zero | step ms | again ms | memory GB | weights: choices |")
    print("|---:|---|---:|---:|---:|---|")
    rows: list[dict[str, Any]] = []
    for budget in args.budgets:
        for zero in (3, 2, "auto"):
            (row,) = autoshard.search_meshes(
                model,
                (),
                {"input_ids": ids, "labels": ids},
                world=math.prod(mesh.values()),
                mesh=mesh,
                hardware="h100",
                zero=zero,
                memory={"budget": int(budget * 1e9)},
            ).rows
            again = row.recomputation.seconds if row.recomputation else 0.0
            chosen = dict(Counter(row.plan.weights.values()))
            rows.append(
                {
                    "budget": budget,
                    "zero": zero,
                    "step": row.timing.step,
                    "again": again,
                    "memory": row.memory.total,
                    "fits": row.fits,
                    "chosen": chosen,
                }
            )
            told = ", ".join(f"{n} {choice}" for choice, n in sorted(chosen.items()))
            held = f"{row.memory.total / 1e9:.1f}" + ("" if row.fits else " (too much)")
            step, again = 1e3 * row.timing.step, 1e3 * again
            print(
                f"| {budget:g} | {zero} | {step:.1f} | {again:.1f} | {held} | {told} |", flush=True
            )
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
