"""zero="auto" beside pp: a weight is whole on dp_shard, or gathered once a step."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

import autoshard
from autoshard.planning import PipelinePlan, Plan
from autoshard.runtime.collectives import ONCE, TWICE, WHOLE
from autoshard.runtime.errors import PlanError
from joined_batch import Sizes
from pipelined import batch, made, moved
from side_by_side import TOLERANCE
from test_composed_pipelines import train


def halves(name: str, sizes: Sizes, one: str = WHOLE) -> Plan:
    """A plan that keeps every second parameter whole, and says no more."""
    names = [each for each, _ in made(name).named_parameters()]
    return Plan(
        "tp",
        sizes.get("tp", 1),
        weights={each: (one, ONCE)[i % 2] for i, each in enumerate(names)},
        outer=Plan("cp", 2) if "cp" in sizes else None,
        pipeline=PipelinePlan(sizes["pp"], "1f1b", 4, 1),
    )


def chosen(name: str, sizes: Sizes, micro: int, options: dict[str, Any]) -> dict[str, Any]:
    """Steps with every second parameter whole, beside the serial model."""
    return train(name, sizes, micro, {"plan": halves(name, sizes), **options})


@pytest.mark.parametrize(
    ("name", "sizes", "micro", "options"),
    [
        ("llama", {"pp": 2, "dp_shard": 2}, 2, {}),
        pytest.param(
            "gpt2", {"pp": 2, "dp_shard": 2}, 2, {"defer_reduction": True}, marks=pytest.mark.slow
        ),
        pytest.param("mixtral", {"pp": 2, "ep": 2}, 1, {}, marks=pytest.mark.slow),
        pytest.param("llama", {"pp": 2, "cp": 2}, 2, {}, marks=pytest.mark.slow),
    ],
)
def test_steps_of_chosen_stages(
    gloo4: Any, name: str, sizes: Sizes, micro: int, options: dict[str, Any]
) -> None:
    results = gloo4(chosen, name, sizes, micro, options)
    for result in results:
        assert max(result["loss"], result["gradient"], result["norm"]) < TOLERANCE, result
    if "dp_shard" in sizes:  # some are whole, some not
        held = sum(result["held"] for result in results) / results[0]["all"]
        assert 1.05 < held < 1.95
