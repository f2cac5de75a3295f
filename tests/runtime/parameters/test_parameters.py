"""Training on sharded storage against the serial model, in two processes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autoshard.runtime.parameters.shard import shard_parameters
from gloo_pool import GlooPool
from sharded import (
    Mixed,
    adamw,
    assert_same,
    batch,
    by_dim,
    compiled_pair,
    local_fraction,
    loss_of,
    tp,
    whole,
)


def train(
    model: Callable[..., torch.Tensor], parameters: Any, optimizer: Any, step: int, rows: int = 4
) -> tuple[float, float]:
    optimizer.zero_grad()
    loss = loss_of(model, batch(step, rows))
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(parameters, 0.5)
    optimizer.step()
    return loss.item(), float(whole(norm))


def run_training(broken: bool) -> tuple[list[str], float]:
    """Two unsharded steps, then sharded ones, with one optimizer that was there before."""
    rank = tp().axis("tp").rank
    serial, model, compiled, log = compiled_pair(lambda: Mixed(broken), 0 * rank)
    parameters = [p for p in model.parameters() if p.requires_grad]
    mine, reference = adamw(parameters), adamw(p for p in serial.parameters() if p.requires_grad)
    scheduler = torch.optim.lr_scheduler.StepLR(mine, 4, 0.5)
    scheduler_reference = torch.optim.lr_scheduler.StepLR(reference, 4, 0.5)
    for step in range(8):
        rows = 6 if step >= 6 else 4
        got = train(model if step < 2 else compiled, parameters, mine, step, rows)
        expected = train(serial, list(serial.parameters()), reference, step, rows)
        assert got == pytest.approx(expected, rel=1e-6), step
        assert_same(model, serial)
        scheduler.step()
        scheduler_reference.step()
        if step == 4:
            model.eval(), serial.eval()
            with torch.no_grad():
                torch.testing.assert_close(compiled(batch(99)), serial(batch(99)))
            model.train(), serial.train()
    scale = model._parameters["scale"]
    held = mine.state[scale]["exp_avg"]
    assert isinstance(held, DTensor) and held.placements == scale.placements
    assert not isinstance(mine.state[scale]["step"], DTensor)
    assert model.head.weight.shape == (11, 8)
    assert model.head._parameters["weight"] is model.embed._parameters["weight"]
    torch.testing.assert_close(model(batch(7)), serial(batch(7)))  # not compiled
    return log, local_fraction(model)


@pytest.mark.parametrize("broken", [False, True])
def test_training_from_an_optimizer_with_state(gloo2: GlooPool, broken: bool) -> None:
    for log, fraction in gloo2(run_training, broken):
        assert log[0] == "shard" and log.count("shard") == 1, log
        runs = [line.split() for line in log[1:]]
        assert runs and all(run[1] == run[3] for run in runs), log  # no parameter without node
        # train, eval without gradients, another batch size; two graphs each after a break
        assert len(runs) == (6 if broken else 3), log
        assert 0.5 < fraction < 0.7


class Attention(nn.Module):
    """The modules that read their parameters in their own ways, and an uneven LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(8, 2, 6, dropout=0.0, batch_first=True)
        self.rnn = nn.LSTM(8, 5, num_layers=2, bidirectional=True, batch_first=True)
        self.gru = nn.GRU(10, 3, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(self.attention(x, x, x, need_weights=False)[0])
        return self.gru(self.rnn(x)[0])[0]


def run_eager_modules() -> tuple[float, int]:
    """A model stored as shards that nothing compiled: slow, and exact."""
    torch.manual_seed(0)
    serial = Attention()
    model = copy.deepcopy(serial)
    shard_parameters({p: by_dim(p) for p in model.parameters()}, tp(), broadcast=True)
    for training in (True, False):
        serial.train(training), model.train(training)
        for net in (serial, model):
            net.zero_grad()
        x = torch.randn(3, 4, 8)
        expected, got = serial(x), model(x)
        torch.testing.assert_close(got, expected)
        expected.pow(2).sum().backward()
        got.pow(2).sum().backward()
        assert_same(model, serial, 1e-5)
        with torch.no_grad():  # the fast path of attention
            torch.testing.assert_close(model(x), serial(x))
    first = model.rnn._parameters["weight_ih_l0"]
    model.rnn.weight_ih_l0 = nn.Parameter(torch.zeros(20, 8))
    assert (
        not model.rnn._flat_weights[0].any() and model.rnn._parameters["weight_ih_l0"] is not first
    )
    return local_fraction(model), len(repr(model))


def test_modules_with_their_own_ways_of_reading(gloo2: GlooPool) -> None:
    for fraction, _ in gloo2(run_eager_modules):
        assert 0.4 < fraction < 0.7


def run_first_call_without_gradients(context: str) -> None:
    serial, model, compiled, log = compiled_pair(Mixed, 0)
    serial.eval(), model.eval()
    with getattr(torch, context)():
        torch.testing.assert_close(compiled(batch(0)), serial(batch(0)))
    for net in (compiled, serial):
        loss_of(net, batch(1)).backward()
    assert_same(model, serial)
    adamw(model.parameters()).step()  # an inference tensor could not be updated


@pytest.mark.parametrize("context", ["no_grad", "inference_mode"])
def test_the_first_call_may_be_inference(gloo2: GlooPool, context: str) -> None:
    gloo2(run_first_call_without_gradients, context)
