"""`autoshard.shard` before the first call, models on the meta device, parameters in another order
of memory, and DTensor outputs."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autoshard.verification.comparison import furthest
from models import CASES
from side_by_side import Pair, check, difference


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
    worst = furthest(difference(p.grad, wanted[k].grad, 1.0) for k, p in model.named_parameters())
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
    for placements, error, gradient in gloo2(dtensor_outputs):
        assert placements == ["S(2)"]
        assert error < 1e-5 and gradient < 1e-6


class Turned(nn.Module):
    """A parameter whose memory is not that of its rows, and what reads it so."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 8).t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        read = self.weight.as_strided((8, 8), self.weight.stride(), 3)
        return x @ self.weight + (x @ read + self.weight.t().view(-1)[8:16]).repeat(1, 2)


def turned() -> dict[str, Any]:
    torch.manual_seed(0)
    pair, x = Pair(Turned()), torch.randn(4, 8)
    pair.train([lambda model: model(x).square().mean()] * 2)
    assert pair.model.weight.stride() == pair.serial.weight.stride() == (1, 8)
    strided = [model.weight.as_strided((4, 4), (9, 2)) for model in (pair.model, pair.serial)]
    torch.testing.assert_close(*strided)
    return pair.result()


def test_a_parameter_keeps_its_strides(gloo2: Any) -> None:
    check(gloo2(turned), share=1.0)
