"""The backend against the serial model: loss and every gradient, three optimizer steps."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from models import CASES

SHARDED = ["llama", "gpt2", "bert", "t5", "vit", "mixtral"]


def train(name: str, tp: int, inner: str, steps: int, options: dict[str, Any]) -> dict[str, Any]:
    """Train a case sharded and serially side by side; the worst relative differences."""
    import autoshard

    case = CASES[name]
    torch.manual_seed(0)
    model = case.make_model()
    serial = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    reference = torch.optim.SGD(serial.parameters(), lr=0.05)
    compiled = torch.compile(
        model, backend="autoshard", options={"mesh": {"tp": tp}, "inner": inner, **options}
    )
    worst: dict[str, float] = {"loss": 0.0, "gradient": 0.0}
    where = ""
    for step in range(steps):
        batch = case.make_batch(step)
        loss, expected = case.loss(compiled, batch), case.loss(serial, batch)
        loss.backward()
        expected.backward()
        worst["loss"] = max(worst["loss"], float(abs(loss - expected) / abs(expected)))
        wanted = dict(serial.named_parameters())
        scale = max(float(p.grad.abs().max()) for p in wanted.values() if p.grad is not None)
        for key, p in model.named_parameters():
            g, w = p.grad, wanted[key].grad
            if w is None:
                assert g is None or not g.any(), f"{key}: a gradient where serial has none"
                continue
            assert g is not None, f"{key}: no gradient"
            g = g.full_tensor() if isinstance(g, DTensor) else g
            error = float((g - w).abs().max()) / scale
            if error > worst["gradient"]:
                worst["gradient"], where = error, key
        optimizer.step()
        reference.step()
        optimizer.zero_grad()
        reference.zero_grad()
    total = sum(p.numel() for p in model.parameters())
    split = sum(
        p.numel()
        for p in model.parameters()
        if isinstance(p, DTensor) and p.to_local().numel() < p.numel()
    )
    return {
        **worst,
        "where": where,
        "share": split / total,
        "programs": len(autoshard.programs(model)),
    }


def check(results: list[dict[str, Any]], share: float = 0.0) -> None:
    for result in results:
        assert result["loss"] < 1e-5 and result["gradient"] < 1e-5, result
        assert result["share"] >= share, result
        assert result["programs"] >= 1, "the backend compiled nothing"


@pytest.mark.parametrize("name", SHARDED)
def test_three_steps_equal_serial_tp2(gloo2: Any, name: str) -> None:
    check(gloo2(train, name, 2, "aot_eager", 3, {}), share=0.9)


@pytest.mark.parametrize("name", SHARDED)
def test_three_steps_equal_serial_tp4(gloo4: Any, name: str) -> None:
    check(gloo4(train, name, 4, "aot_eager", 3, {}), share=0.9)
