"""Predicted steps under memory budgets: placements and what is kept decided together, or in turn.

    python benchmarks/kept_values.py [--layers 4] [--tokens 8192] [--tp 8] [--host GB] [--json FILE]

A Llama of 8B shape on meta tensors, planned for h100s. Each row is a budget: the states of training
and a part of the free plan's activations. Columns: the step with placements planned first and
recomputation after them, in units of the free plan's; with both from one problem; their ratio; how
many plans of each kind fit; by how much at most, in the same units, a placement with any choice in
the segments of the quickest could be quicker ("gap"). host: gigabytes that a rank may keep on its
host. Above the table: table entries and processor seconds of one solution of the planner's problem,
and of the joint one.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import autoshard
from autoshard.building import one_rank
from autoshard.planning import planner
from autoshard.planning.cost import planned_on
from autoshard.planning.estimate import Training, footprint, profile, timing
from autoshard.planning.kept_values import KeptSearch

SHARES = (0.8, 0.6, 0.5, 0.4, 0.25)


def captured(layers: int, tokens: int, tp: int) -> tuple[Any, ...]:
    """What the planner is given for the model."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        use_cache=False,
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
        ids = torch.zeros(1, tokens, dtype=torch.long)
    found: list[tuple[Any, ...]] = []

    def recorded(*arguments: Any) -> Any:
        found.append(arguments)
        return planner.plan_graph(*arguments)

    batch = {"input_ids": ids, "labels": ids}
    with mock.patch.object(one_rank, "plan_graph", recorded):
        autoshard.trace(model, kwargs=batch, mesh={"tp": tp}, hardware="h100")
    return found[0]


def one_solution(given: tuple[Any, ...]) -> dict[str, float]:
    """Entries and seconds of the planner's problem, and of the joint one."""
    gm, n, hardware, request = given
    default = planner.plan_graph(*given)
    search = KeptSearch(gm, default, n, planned_on(hardware), 1)
    search.price = 1e-10
    builder = planner.builder_of(gm, n, hardware, request, request.prices)
    problem = builder.build()
    start = time.process_time()
    alone = problem.graph.solve()
    middle = time.process_time()
    joint, _ = search.solved(builder.prices, problem)
    end = time.process_time()
    return {
        "entries": alone.work,
        "seconds": middle - start,
        "joint entries": joint.work,
        "joint seconds": end - middle,
    }


def under(given: tuple[Any, ...], share: float) -> dict[str, float]:
    """One row of the table."""
    gm, n, hardware, request = given
    default, cluster = planner.plan_graph(*given), planned_on(hardware)
    free = profile(gm, default, request.parameters, n, cluster, request.layout.bucket_bytes)
    held = footprint(free, request.layout, Training())
    budget = int(held.total - (1 - share) * held.activations)
    step = timing(free, request.layout, Training(), cluster, cluster.links({"tp": n})).step
    found: list[Any] = []
    priced = planner._priced

    def recorded(*arguments: Any) -> Any:
        found.append(priced(*arguments))
        return found[-1]

    with mock.patch.object(planner, "_priced", recorded):
        gap = None
        try:
            asked = replace(request, memory_budget=budget)
            chosen = planner.plan_graph(gm, n, hardware, asked)
            gap = chosen.placements.gap(chosen) if chosen.placements else None
        except autoshard.PlanError:
            pass
    turns = 1 + planner._PLACEMENTS
    kinds = [
        [one.seconds for one in kind if one.least <= budget]
        for kind in (found[:turns], found[turns:])
    ]
    first, joint = (min(kind, default=float("nan")) / step for kind in kinds)
    counts = dict(zip(("fit in turn", "fit together"), map(len, kinds)))
    steps = {"in turn": first, "together": joint, "ratio": joint / first}
    return {"budget": share, **steps, **counts, "gap": float("nan") if gap is None else gap / step}


def main() -> None:
    """Print both."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--tp", type=int, default=8)
    parser.add_argument("--host", type=float, default=0.0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    gm, n, hardware, request = captured(args.layers, args.tokens, args.tp)
    given = (gm, n, hardware, replace(request, host_memory=int(args.host * 1e9)))
    search = one_solution(given)
    print(", ".join(f"{name}: {value:,.4g}" for name, value in search.items()) + "\n")
    rows = [under(given, share) for share in SHARES]
    print("| " + " | ".join(rows[0]) + " |\n|" + "---:|" * len(rows[0]))
    for row in rows:
        print("| " + " | ".join(f"{value:.4g}" for value in row.values()) + " |")
    if args.json:
        args.json.write_text(json.dumps({"search": search, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
