"""`memory_budget`: a step stays within it as counted, and its gradients are those of the serial
model."""

from __future__ import annotations

import copy
import functools
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed

import autoshard
from autoshard.errors import ConfigError
from live_storages import LiveStorages, measure_step
from models_hf import llama
from traced import builder

WIDTH, LAYERS, VOCABULARY = 32, 6, 64


def make_llama() -> nn.Module:
    sizes = {"hidden_size": WIDTH, "intermediate_size": 3 * WIDTH, "vocab_size": VOCABULARY}
    return llama(num_hidden_layers=LAYERS, **sizes)()


def make_gpt2(dropout: float = 0.0) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    off = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    sizes = {"n_positions": 64, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": 4}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, use_cache=False, **sizes, **off))
    model.loss_type = "ForCausalLM"  # else a warning breaks the graph before the loss
    return model


def make_vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": WIDTH, "intermediate_size": 4 * WIDTH, "num_hidden_layers": LAYERS}
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = ViTConfig(num_attention_heads=4, image_size=32, patch_size=4, **sizes, **off)
    return ViTForImageClassification(config)


MODELS = {
    "llama": make_llama,
    "gpt2": make_gpt2,
    "gpt2 with dropout": functools.partial(make_gpt2, 0.2),
    "vit": make_vit,
}


def batch(name: str) -> dict[str, torch.Tensor]:
    drawn = torch.Generator().manual_seed(1)
    if name == "vit":
        images = torch.randn(32, 3, 32, 32, generator=drawn)
        return {"pixel_values": images, "labels": torch.arange(32) % 2}
    ids = torch.randint(3, VOCABULARY, (16, 64), generator=drawn)
    return {"input_ids": ids, "labels": ids}


def step(
    name: str, inner: str, budget: int | None, host: int | None = None
) -> tuple[dict[str, int], Any]:
    """The bytes measured in a step, and its gradients."""
    torch.compiler.reset()
    torch.manual_seed(0)
    live, model, data = LiveStorages(), MODELS[name]().train(), batch(name)
    options: dict[str, Any] = {"mesh": {"tp": 1}, "inner": inner, "rng": "invariant"}
    if budget is not None:
        options["memory"] = {"budget": budget, "host": host}
    compiled = torch.compile(model, backend="autoshard", options=options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    try:
        found = measure_step(live, model, lambda: compiled(**data).loss, optimizer)
    finally:
        live.restore()
    found["host"] = live.on_host
    torch.manual_seed(2)
    compiled(**data).loss.backward()
    return found, [p.grad for p in model.parameters()]


def serial_gradients(name: str) -> list[Any]:
    torch.manual_seed(0)
    model = copy.deepcopy(MODELS[name]()).train()
    model(**batch(name)).loss.backward()
    return [p.grad for p in model.parameters()]


def floor(name: str, inner: str) -> int:
    """What the error says a step needs at least."""
    with pytest.raises(BackendCompilerFailed, match="BudgetTooSmall: no plan fits") as caught:
        step(name, inner, 1_700_000)
    found = re.search(r"Raise the budget to ([\d,]+)", str(caught.value))
    assert found is not None
    return int(found[1].replace(",", ""))


def check(name: str, inner: str, shares: tuple[float, ...]) -> None:
    free, before = step(name, inner, None)
    want = before if "dropout" in name else serial_gradients(name)
    least = floor(name, inner)
    budgets = sorted({max(least, int(share * free["peak"])) for share in shares})
    for budget in budgets:
        found, gradients = step(name, inner, budget)
        assert found["peak"] <= budget < free["peak"], (budget, free, found)
        for got, expected in zip(gradients, want, strict=True):
            torch.testing.assert_close(got, expected, rtol=2e-4, atol=1e-6)


def half(name: str, inner: str, host: int | None = None) -> None:
    free, before = step(name, inner, None)
    budget = int(0.5 * free["peak"])
    found, gradients = step(name, inner, budget, host)
    assert found["peak"] <= budget
    assert bool(found["host"]) == bool(host)
    for got, expected in zip(gradients, before, strict=True):
        torch.testing.assert_close(got, expected, rtol=2e-4, atol=1e-6)


def test_a_step_stays_within_its_budget() -> None:
    half("gpt2 with dropout", "aot_eager")


@pytest.mark.slow
def test_a_step_that_keeps_values_on_the_host_stays_within_its_budget() -> None:
    half("gpt2 with dropout", "aot_eager", host=1 << 30)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*script_method.*:DeprecationWarning")
@pytest.mark.parametrize("name", list(MODELS))
def test_every_model_under_every_budget(name: str) -> None:
    check(name, "aot_eager", (0.6, 0.4, 0.25))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*script_method.*:DeprecationWarning")
def test_the_code_of_inductor_stays_within_a_budget() -> None:
    """One budget: each try makes the code anew."""
    half("llama", "inductor")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*script_method.*:DeprecationWarning")
def test_the_code_of_inductor_keeps_values_on_the_host() -> None:
    half("llama", "inductor", host=1 << 30)


def trained(sizes: dict[str, int], budget: int | None) -> dict[str, Any]:
    """What `measure_step` finds on a rank, and the whole gradients of a further step."""
    torch.manual_seed(0)
    live, model, data = LiveStorages(), make_llama().train(), batch("llama")
    options: dict[str, Any] = {
        "mesh": sizes,
        "inner": "aot_eager",
        "planner": {"bucket_bytes": 20_000},
    }
    if budget is not None:
        options["memory"] = {"budget": budget}
    compiled = torch.compile(model, backend="autoshard", options=options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    try:
        found: dict[str, Any] = measure_step(live, model, lambda: compiled(**data).loss, optimizer)
    finally:
        live.restore()
    compiled(**data).loss.backward()
    found["gradients"] = [p.grad.full_tensor() for p in model.parameters()]  # type: ignore[union-attr]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"tp": 2}, {"dp_shard": 2}])
def test_ranks_stay_within_their_budget(gloo2: Any, sizes: dict[str, int]) -> None:
    free = gloo2(trained, sizes, None)
    budget = int(0.5 * max(one["peak"] for one in free))
    want = serial_gradients("llama")
    for found in gloo2(trained, sizes, budget):
        assert found["peak"] <= budget, (sizes, budget, found["peak"])
        for got, expected in zip(found["gradients"], want, strict=True):
            torch.testing.assert_close(got, expected, rtol=2e-4, atol=1e-6)


@pytest.mark.parametrize("axis", ["dp_replicate", "dp_shard"])
def test_a_longer_batch_stays_within_the_budget(axis: str) -> None:
    """What the first batch computes again may be too little for a longer one. Where another choice
    gathers in the same order it is taken, also by a second model of the same operators."""
    dist.init_process_group("fake", rank=0, world_size=2)

    def peaks(budget: int | None, rows: tuple[int, ...]) -> Any:
        torch.compiler.reset()
        layers = (nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8), nn.GELU())
        model = nn.Sequential(*layers, *copy.deepcopy(layers))
        options = {"mesh": {axis: 2}, "inner": "aot_eager", "memory": {"budget": budget}}
        run = torch.compile(model, backend="autoshard", dynamic=False, options=options)
        for n in rows:
            run(torch.ones(n, 8)).sum().backward()
        return [program.memory().peak for program in autoshard.programs(model)]

    try:
        free, long = peaks(None, (512, 1024))
        budget = int(0.9 * long)
        alone, shorter = peaks(budget, (1024, 512))
        assert max(free, alone, shorter) <= budget
        if axis == "dp_replicate":
            assert peaks(budget, (512, 1024)) == [free, alone]
        else:
            with pytest.raises(BackendCompilerFailed, match="BudgetTooSmall.*largest batch first"):
                peaks(budget, (512, 1024))
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
def test_two_ranks_compute_again_what_fits() -> None:
    """Gathers run again in backward, counted in the graphs of one rank."""
    torch.compiler.reset()
    build = builder(make_llama(), (), batch("llama"))
    free = build({"tp": 2})
    peak = free.memory(inner="aot_eager").peak
    tight = build({"tp": 2}, memory={"budget": int(0.45 * peak)}, inner="aot_eager")
    assert tight.memory().peak <= 0.45 * peak
    assert tight.decisions.recomputation is not None
    again = [one for one in tight.collectives() if one.phase == "backward"]
    assert len(again) >= len([one for one in free.collectives() if one.phase == "backward"])
    assert "computed again in backward" in tight.explain()
    with pytest.raises(ConfigError, match="inner='eager' computes nothing again"):
        build({"tp": 2}, memory={"budget": peak}, inner="eager")
    roomy = build({"tp": 2}, memory={"budget": 100 * peak}, inner="eager")
    assert roomy.decisions.recomputation is None
