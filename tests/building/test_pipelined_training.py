"""Pipeline parallelism on processes: training, evaluation, checkpoints, errors on all ranks."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autoshard
from autoshard.verification.comparison import furthest
from gloo_pool import GlooPool
from models import CASES
from pipelined import batch, clipped_step, differing, evaluated, made, moved, optimizers_of, read
from side_by_side import TOLERANCE, Pair


def train(name: str, stages: int, options: dict[str, Any]) -> dict[str, Any]:
    """Three steps with clipping, then an evaluation, beside the serial model."""
    case = CASES[name]
    pair = Pair(made(name), mesh={"pp": stages}, **options)
    optimizers = optimizers_of(pair)
    norms = 0.0
    for step in range(3):
        given = batch(name, step)
        pair.backward(lambda model, given=given: case.loss(model, given))  # type: ignore[misc]
        pair.compare_gradients()
        norms = furthest([norms, clipped_step(pair, optimizers)])
    return evaluated(pair, case, batch(name, 9), norms)


def check(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert all(result[kind] < TOLERANCE for kind in ("loss", "gradient", "norm")), result
    assert sum(result["held"] for result in results) == results[0]["all"]
    assert max(result["held"] for result in results) < results[0]["all"]


def test_three_steps_of_a_saved_plan(gloo2: Any, tmp_path: Path) -> None:
    """Cut in the second layer, where the search would not."""
    model, options = made("llama"), {"mesh": {"pp": 2}, "pipeline": {"microbatches": 2}}
    traced: Any = autoshard.trace(model, kwargs=batch("llama", 0), **options)
    body, file = json.loads(traced.plan.text()), tmp_path / "plan.json"
    homes, ((key, _),) = body["pipeline"]["homes"], body["pipeline"]["graphs"].items()
    norm = next(n for n in traced.stages[1].graph.nodes if n.name == "pow_4")
    assert "post_attention_layernorm" in norm.meta["stack_trace"]
    body["pipeline"]["graphs"][key] = [norm.name]
    for part in ("input_layernorm", "self_attn"):
        homes.update({name: 0 for name in homes if name.startswith(f"model.layers.1.{part}")})
    file.write_text(json.dumps(body))
    results = gloo2(train, "llama", 2, {"plan": str(file)})
    check(results)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    for home, result in enumerate(results):
        assert result["held"] == sum(sizes[name] for name, at in homes.items() if at == home)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gpt2", {"pipeline": {"schedule": "gpipe"}}),
        ("gpt2", {"pipeline": {"schedule": "zb1"}}),
        ("llama", {"pipeline": {"schedule": "interleaved"}}),
        ("gpt2", {"pipeline": {"microbatches": 2}, "inner": "inductor"}),
        ("t5", {}),
        ("vit", {}),
        ("mixtral", {}),
    ],
)
def test_other_models_and_schedules(gloo2: Any, name: str, options: dict[str, Any]) -> None:
    check(gloo2(train, name, 2, options))


class Turned(nn.Module):
    """Parameters that lie otherwise than they are stored: by channels, and transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1).to(memory_format=torch.channels_last)
        self.second = nn.Parameter(torch.randn(16, 8 * 16).t())
        self.third = nn.Parameter(torch.randn(5, 16).t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pooled = nn.functional.max_pool2d(self.first(x).relu(), 2).flatten(1)
        return ((pooled @ self.second).tanh() @ self.third).square().mean()


def train_turned() -> float:
    torch.manual_seed(0)
    pair = Pair(Turned(), mesh={"pp": 2}, inner="inductor")
    x = torch.randn(4, 3, 8, 8)
    pair.backward(lambda model: model(x))
    pair.compare_gradients()
    return furthest([pair.loss, pair.gradient])


@pytest.mark.slow
def test_parameters_that_lie_otherwise_than_they_are_stored(gloo2: Any) -> None:
    assert furthest(gloo2(train_turned)) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_four_stages(gloo4: Any, name: str) -> None:
    check(gloo4(train, name, 4, {}))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "second"), [({"pp": 2}, {"dp_shard": 2}), ({"tp": 2}, {"pp": 2})]
)
def test_checkpoints_move_between_meshes(
    gloo2: Any, first: dict[str, int], second: dict[str, int]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        assert furthest(gloo2(moved, folder, first, second)) < TOLERANCE


def test_what_eager_code_reads_and_writes(gloo2: Any) -> None:
    for found in gloo2(read, "llama", {"pp": 2}):
        assert found["logits"] < TOLERANCE
        assert "a gradient arrived at output 1 of a pipeline, beside the loss" in found["beside"]
        assert "'schedule': 'gpipe'" in found["beside"]
        assert found["again"]
        assert found["state"] == 0.0 and found["sum"] < TOLERANCE and found["write"] == 0.0


def with_a_stage_that_fails() -> str:
    """The error of each rank where the second stage runs out of something in its third action."""
    from autoshard.runtime.pipeline.stage import StageRun

    step = StageRun.run

    def run(self: StageRun, action: Any) -> None:
        if self.program.number == 1 and len(self.done) == 2:
            raise MemoryError("planted")
        step(self, action)

    StageRun.run = run  # type: ignore[method-assign]
    try:
        options = {"mesh": {"pp": 2}, "inner": "eager", "timeout": 15}
        compiled: Any = torch.compile(
            CASES["mlp"].make_model(), backend="autoshard", options=options
        )
        CASES["mlp"].loss(compiled, CASES["mlp"].make_batch(0)).backward()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        StageRun.run = step  # type: ignore[method-assign]
    return ""


@pytest.mark.slow
def test_a_stage_that_fails_is_an_error_on_all() -> None:
    pool = GlooPool(2)  # of its own: what is left in its groups is of no use to others
    try:
        first, second = pool(with_a_stage_that_fails)
    finally:
        pool.stop()
    assert "planted" in second
    assert "planted" in first and "rank 1" in first, first


def test_ranks_that_differ_all_raise(gloo2: Any) -> None:
    for text in gloo2(
        differing, {"pp": 2}, [{"pipeline": {"microbatches": 2}}, {"pipeline": {"microbatches": 4}}]
    ):
        assert "microbatches" in text
    for text in gloo2(
        differing, {"pp": 2}, [{"pipeline": {"microbatches": 3}}, {"pipeline": {"microbatches": 3}}]
    ):
        assert "does not divide into microbatches=3" in text
    for text in gloo2(differing, {"pp": 2}, [{"rng": "tracker"}] * 2):
        assert "rng" in text
