"""`autoshard.shard` before the first call, models on the meta device, and DTensor outputs."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from models import CASES


def train_from_meta(name: str, tp: int) -> dict[str, Any]:
    import autoshard

    case = CASES[name]
    torch.manual_seed(0)
    serial = case.make_model()
    with torch.device("meta"):
        model = case.make_model()
    batch = case.make_batch(0)
    options = {"mesh": {"tp": tp}, "inner": "aot_eager"}
    autoshard.shard(model, (), batch, **options)
    nan = all(p.to_local().isnan().all() for p in model.parameters())
    model.load_state_dict(serial.state_dict())
    for key, buffer in serial.named_buffers():
        owner, _, last = key.rpartition(".")
        model.get_submodule(owner)._buffers[last] = buffer.clone()
    loss = case.loss(torch.compile(model, backend="autoshard", options=options), batch)
    expected = case.loss(serial, batch)
    loss.backward()
    expected.backward()
    wanted = dict(serial.named_parameters())
    worst = max(
        float((p.grad.full_tensor() - wanted[k].grad).abs().max())
        for k, p in model.named_parameters()
    )
    local = sum(p.to_local().numel() for p in model.parameters())
    return {
        "nan": nan,
        "loss": abs(float(loss.detach() - expected.detach())),
        "gradient": worst,
        "share": local / sum(p.numel() for p in model.parameters()),
    }


def test_a_meta_model_is_stored_loaded_and_trained(gloo2: Any) -> None:
    for result in gloo2(train_from_meta, "llama", 2):
        assert result["nan"], "shards that nobody loaded must show"
        assert result["loss"] < 1e-5 and result["gradient"] < 1e-5, result
        assert result["share"] < 0.55, result


def dtensor_outputs() -> tuple[list[str], float, float]:
    case = CASES["llama"]
    torch.manual_seed(0)
    model = case.make_model()
    serial = copy.deepcopy(model)
    options = {"mesh": {"tp": 2}, "inner": "aot_eager", "outputs": "dtensor"}
    compiled = torch.compile(model, backend="autoshard", options=options)
    batch = case.make_batch(0)
    logits, expected = compiled(**batch).logits, serial(**batch).logits
    assert isinstance(logits, DTensor)
    logits.full_tensor().square().mean().backward()
    expected.square().mean().backward()
    wanted = serial.lm_head.weight.grad
    got = dict(model.named_parameters())["lm_head.weight"].grad.full_tensor()
    difference = float((logits.full_tensor() - expected).abs().max())
    return [str(p) for p in logits.placements], difference, float((got - wanted).abs().max())


def test_outputs_as_dtensors_are_whole_and_differentiable(gloo2: Any) -> None:
    for placements, difference, gradient in gloo2(dtensor_outputs):
        assert placements == ["S(2)"]
        assert difference < 1e-5 and gradient < 1e-6
