"""What travels over ep for a mixture of experts: rows or weights, and what either costs, predicted.

    python benchmarks/expert_axis.py [--mesh ep=8] [--tokens 512 4096 32768] [--json PATH]

One layer of Mixtral 8x7B's shape and one of Qwen3-30B-A3B's, in bfloat16 on meta tensors, on h100s,
with T tokens a rank. Milliseconds of a step that the planner charges the mixture with rows and with
weights, and those of the whole step that the estimate predicts for both; the way that the plan
takes is marked. Nothing runs.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch
import transformers

import autoshard
from autoshard.explain.alternatives import alternatives

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "Mixtral 8x7B": (
        "Mixtral",
        {"hidden_size": 4096, "intermediate_size": 14336, "num_local_experts": 8},
    ),
    "Qwen3-30B-A3B": (
        "Qwen3Moe",
        {
            "hidden_size": 2048,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "num_key_value_heads": 4,
            "head_dim": 128,
        },
    ),
}


def made(name: str) -> torch.nn.Module:
    """One layer of a model, on the meta device."""
    kind, settings = SHAPES[name]
    config = getattr(transformers, f"{kind}Config")(
        **settings,
        num_hidden_layers=1,
        num_attention_heads=32,
        vocab_size=32000,
        use_cache=False,
    )
    with torch.device("meta"):
        model: torch.nn.Module = getattr(transformers, f"{kind}ForCausalLM")(config)
    return model.bfloat16()


def row(name: str, mesh: dict[str, int], tokens: int) -> dict[str, Any]:
    """What the planner charges either way, what it takes, and the step with each."""
    ids = torch.zeros(1, tokens, dtype=torch.long, device="meta")
    found: dict[str, Any] = {"model": name, "tokens": tokens}
    for way in ("auto", "rows", "weights"):
        torch.compiler.reset()
        program = autoshard.trace(
            made(name),
            kwargs={"input_ids": ids, "labels": ids},
            mesh=mesh,
            hardware="h100",
            planner={"ep_exchange": way},
        )
        if way == "auto":
            ((node, charged),) = program.decisions.on_ep.items()
            found["charged"] = charged
            found["chosen"] = program.decisions.strategies[node].on_ep
        else:
            found[way] = alternatives(program)[0].timing.step
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mesh", default="ep=8")
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 4096, 32768])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    mesh = {name: int(n) for name, n in (one.split("=") for one in args.mesh.split(","))}
    print(f"| {math.prod(mesh.values())} h100, {args.mesh} | tokens a rank ", end="")
    print("| rows, charged | weights, charged | step, rows | step, weights | chosen |")
    print("|---|---:|---:|---:|---:|---:|---|")
    rows = []
    for name in SHAPES:
        for tokens in args.tokens:
            one = row(name, mesh, tokens)
            rows.append(one)
            charged = [one["charged"].get(way, math.nan) for way in ("rows", "weights")]
            figures = [f"{1e3 * each:.2f}" for each in (*charged, one["rows"], one["weights"])]
            cells = [name, f"{tokens:,}", *figures, one["chosen"]]
            print("| " + " | ".join(cells) + " |", flush=True)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
