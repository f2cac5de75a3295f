"""Data-parallel ranks whose first batches differ: all store what the first one planned."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import torch

import autoshard
from autoshard import backend
from autoshard.verification.comparison import furthest
from models import CASES
from side_by_side import difference


def apart() -> dict[str, Any]:
    """dp rank 0 has 3 rows and its plan; dp rank 1 has 5 rows and would store otherwise."""
    from autoshard.runtime.collectives.states import I, S
    from autoshard.runtime.mesh import init_mesh

    sizes = {"dp_shard": 2, "tp": 2}
    rank = init_mesh(sizes, "cpu").axis("dp_shard").rank
    model = CASES["mlp"].make_model()
    serial = copy.deepcopy(model)
    torch.manual_seed(11)
    # the second rank's length changes, and only that rank compiles again
    steps = [
        [tuple(torch.randn(rows, 64) for _ in range(2)) for rows in lengths]
        for lengths in ((3, 5), (3, 5), (3, 6))
    ]
    compiled: Any = torch.compile(
        model, backend="autoshard", options={"mesh": sizes, "inner": "aot_eager"}
    )
    planned = backend.unplanned_parameters
    swaps = {S(0): S(1), S(1): S(0), I: I}

    def otherwise(*args: Any) -> Any:
        found = planned(*args)
        if rank == 0:
            return found
        return {p: (swaps[s] if p.dim() == 2 else I, how) for p, (s, how) in found.items()}

    with mock.patch.object(backend, "unplanned_parameters", otherwise):
        compiled(*steps[0][rank]).backward()
    first = {n: str(p.placements) for n, p in model.named_parameters()}
    worst = 0.0
    for step, parts in enumerate(steps):
        if step:
            compiled(*parts[rank]).backward()
        for own in parts:
            (serial(*own) / len(parts)).backward()
        for p, q in zip(model.parameters(), serial.parameters()):
            assert p.grad is not None and q.grad is not None
            worst = furthest([worst, difference(p.grad, q.grad)])
        model.zero_grad()
        serial.zero_grad()
    return {"stored": first, "worst": worst, "programs": len(autoshard.programs(model))}


def test_all_ranks_store_by_the_first_ones_plan(gloo4: Any) -> None:
    results = gloo4(apart)
    assert all(result["stored"] == results[0]["stored"] for result in results)
    assert "Shard(dim=1)" in results[0]["stored"]["body.down.weight"]
    assert [result["programs"] for result in results] == [1, 1, 2, 2]
    assert all(result["worst"] < 1e-5 for result in results), results
