"""zero="auto" beside pp: a weight is whole on dp_shard, or gathered once a step."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from test_composed_pipelines import train

import autoshard
from autoshard.planning import PipelinePlan, Plan
from autoshard.runtime.collectives import ONCE, TWICE, WHOLE
from autoshard.runtime.errors import PlanError
from autoshard.verification.comparison import furthest
from joined_batch import Sizes
from pipelined import batch, made, moved
from side_by_side import TOLERANCE


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
            "gpt2",
            {"pp": 2, "dp_shard": 2},
            2,
            {"gradients": {"defer": True}},
            marks=pytest.mark.slow,
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
        assert all(result[kind] < TOLERANCE for kind in ("loss", "gradient", "norm")), result
    if "dp_shard" in sizes:  # some are whole, some not
        held = sum(result["held"] for result in results) / results[0]["all"]
        assert 1.05 < held < 1.95


@pytest.mark.slow
def test_a_checkpoint_of_chosen_stages_moves_to_zero_3(gloo4: Any) -> None:
    sizes = {"pp": 2, "dp_shard": 2}
    with tempfile.TemporaryDirectory() as folder:
        found = gloo4(moved, folder, sizes, {"dp_shard": 4}, halves("llama", sizes))
        assert furthest(found) < TOLERANCE


def test_a_pipeline_plans_saves_and_obeys_choices(tmp_path: Path) -> None:
    sizes, model, given = {"pp": 2, "dp_shard": 4}, made("llama"), batch("llama", 0)
    first = autoshard.trace(model, (), given, mesh=sizes, zero="auto")
    parameters = dict(model.named_parameters())
    assert first.plan.weights.keys() == parameters.keys()
    assert set(first.plan.weights.values()) <= {ONCE, WHOLE}
    for name, parameter in parameters.items():
        assert parameter.dim() < 2 or first.plan.weights[name] == ONCE
    torch.compiler.reset()
    first.plan.save(tmp_path / "first.json")
    same = autoshard.trace(model, (), given, mesh=sizes, plan=tmp_path / "first.json")
    assert same.plan == first.plan
    plan = halves("llama", sizes)
    plan.save(tmp_path / "plan.json")
    torch.compiler.reset()
    again = autoshard.trace(model, (), given, mesh=sizes, plan=tmp_path / "plan.json")
    assert again.plan.weights == plan.weights
    text = again.explain(1000)
    for choice in (ONCE, WHOLE):
        (line,) = [one for one in text.splitlines() if one.startswith(f"{choice} on dp_shard: ")]
        names = {name for name, own in plan.weights.items() if own == choice}
        assert set(line.partition(": ")[2].split(", ")) == names
    torch.compiler.reset()
    with pytest.raises(PlanError, match="gathers model.embed_tokens.weight twice"):
        twice = halves("llama", sizes, TWICE)
        autoshard.trace(model, (), given, mesh=sizes, plan=twice)
