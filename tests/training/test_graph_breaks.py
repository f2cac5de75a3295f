"""Graphs that end early, values between graphs, regions of the model's own, and mutation."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

from autoshard.runtime.collectives import run_ranks
from autoshard.runtime.lazy_gather import lazy
from autoshard.verification.comparison import furthest
from models import CASES
from models_plain import MLP, Regression, vectors
from side_by_side import TOLERANCE, Pair, check, difference, whole

WIDTH, VOCAB = 32, 64


class Broken(nn.Module):
    """A tied embedding and head with a graph break between them."""

    def __init__(self, breaks: bool = True) -> None:
        super().__init__()
        self.breaks = breaks
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.first, self.second = MLP(WIDTH, 4 * WIDTH), MLP(WIDTH, 4 * WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
        h = self.embed(ids)
        h = h + self.first(h)
        if self.breaks:
            torch._dynamo.graph_break()
        if weights is not None:  # which the first graph does not read
            h = h * weights
        logits: torch.Tensor = self.head(self.norm(h + self.second(h)))
        return logits


class Scored(nn.Module):
    """Returns its logits beside their loss, as a language model does; gathering them is dear."""

    vocab = 1024

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body = nn.Embedding(self.vocab, WIDTH), MLP(WIDTH, 4 * WIDTH)
        self.head = nn.Linear(WIDTH, self.vocab, bias=False)

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.head(self.body(self.embed(ids)))
        return logits, F.cross_entropy(logits.flatten(0, 1), ids.flatten())


def ids(step: int, rows: int = 4) -> torch.Tensor:
    return torch.randint(VOCAB, (rows, 16), generator=torch.Generator().manual_seed(step))


def next_token(model: Any, step: int, *more: torch.Tensor) -> torch.Tensor:
    logits = model(ids(step), *more)
    return F.cross_entropy(logits.flatten(0, 1), ids(step).flatten())


def broken() -> dict[str, Any]:
    pair, weights = Pair(Broken()), torch.linspace(0.5, 1.5, WIDTH)
    pair.train([lambda m, s=s: next_token(m, s, weights) for s in range(3)])
    model = pair.model
    assert model.embed._parameters["weight"] is model.head._parameters["weight"], "tie is lost"
    return pair.result()


def test_a_break_with_a_tied_weight_on_both_sides(gloo2: Any) -> None:
    results = gloo2(broken)
    check(results, share=0.9)
    assert results[0]["programs"] >= 2, "the model did not break"


def compiled_loss() -> dict[str, Any]:
    """The logits leave one compiled function sharded and enter another."""
    from autoshard.runtime.lazy_gather import LazyGather

    pair = Pair(Scored())
    seen: list[bool] = []
    loss = torch.compile(
        lambda x, y: F.cross_entropy(x.flatten(0, 1) * 2, y.flatten()),
        backend="autoshard",
        options=pair.options,
    )

    def step(model: Any, s: int) -> torch.Tensor:
        logits, first = model(ids(s))
        seen.append(isinstance(logits, LazyGather))
        return loss(logits, ids(s)) + first

    pair.train([lambda m, s=s: step(m, s) for s in range(2)])
    # serial's logits are plain and ours are lazy, at every step
    # a second reading, by code that is not compiled
    logits, want = pair.compiled(ids(5))[0], pair.serial(ids(5))[0]
    error = difference(logits * 2, want * 2)
    return {**pair.result(), "lazy": seen, "eager": error}


def test_a_lazy_output_enters_another_compiled_function(gloo2: Any) -> None:
    results = gloo2(compiled_loss)
    check(results)
    assert all(r["lazy"] == [True, False] * 2 for r in results), results
    assert all(r["eager"] < 1e-5 for r in results), results


def repeated_use() -> dict[str, Any]:
    """Called twice a step, backward twice, two models in one step, and the eager model."""
    one, two = Pair(Regression(MLP())), Pair(Regression(MLP(inner=100)))

    def twice(model: Any) -> torch.Tensor:
        return model(**vectors(0)) + model(**vectors(1))

    one.train([twice, twice])
    for s in range(3):  # gradients add up
        one.backward(lambda m, s=s: m(**vectors(s)))
    one.compare_gradients()
    two.train([lambda m: m(**vectors(5))])
    one.train([lambda m: m(**vectors(6))])

    eager = one.model(**vectors(7))
    want = one.serial(**vectors(7))
    for p in (*one.model.parameters(), *one.serial.parameters()):
        p.grad = None
    eager.backward()
    want.backward()
    one.compare_gradients()
    return {**one.result(), "eager": difference(eager, want), "other": two.result()}


def test_calls_models_and_gradients_add_up(gloo2: Any) -> None:
    results = gloo2(repeated_use)
    check(results)
    check([r["other"] for r in results])
    assert all(r["eager"] < 1e-6 for r in results), results


def checkpointed(inner: str) -> dict[str, Any]:
    case = CASES["llama"]
    model = case.make_model()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    pair = Pair(model, inner=inner)
    pair.train([lambda m, s=s: case.loss(m, case.make_batch(s)) for s in range(2)])
    return pair.result()


def test_activation_checkpointing(gloo2: Any) -> None:
    check(gloo2(checkpointed, "aot_eager"), share=0.9)


def autocast(inner: str, ambient: bool) -> dict[str, Any]:
    pair = Pair(Regression(MLP()), inner=inner)

    def loss(model: Any, s: int) -> torch.Tensor:
        context = torch.autocast("cpu", dtype=torch.bfloat16)
        with context if ambient else contextlib.nullcontext():
            return model(**vectors(s))

    pair.train([lambda m, s=s: loss(m, s) for s in range(2)])
    return pair.result()


def test_autocast_around_the_call(gloo2: Any) -> None:
    # bf16 has 8 bits: partial sums that are rounded before they are added differ in the last
    for inner in ("aot_eager", "eager"):
        results = gloo2(autocast, inner, True)
        check(results, tolerance=2e-2)
        assert results[0]["gradient"] > 1e-6, "nothing was computed in bf16"


class Padded(nn.Module):
    """As many rows of zeros as numbers of numpy say, which Dynamo makes tensors of: no fake tensor
    knows, and the frame runs as eager code, after our backend has said so on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor, rows: Any) -> torch.Tensor:
        y: torch.Tensor = self.down(F.pad(self.up(x).relu(), (0, 0, rows, rows)))
        return y.square().mean()


def padded(axis: str) -> dict[str, Any]:
    pair = Pair(Padded(), mesh={axis: 2})
    pair.train([lambda m, n=n: m(torch.ones(4, 6, 8), np.int64(n)) for n in (1, 2)])
    return pair.result()


@pytest.mark.parametrize("axis", ["tp", "dp_shard"])
def test_what_no_fake_tensor_knows_is_left_to_eager_code(gloo2: Any, axis: str) -> None:
    results = gloo2(padded, axis)
    assert furthest(r[kind] for r in results for kind in ("loss", "gradient")) < TOLERANCE
    assert any(r["share"] for r in results), "no parameter is stored in parts"


class Special(nn.Module):
    """A token with a parameter of its own (T5Gemma 2): the backend stores the parameters, and then
    finds that no fake tensor knows how many rows the mask chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.row = nn.Parameter(torch.linspace(0, 1, WIDTH))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        x[ids == 3] = self.row
        y: torch.Tensor = self.head(x)
        return y.square().mean()


def special(axis: str) -> dict[str, Any]:
    pair = Pair(Special(), mesh={axis: 2})
    pair.train([lambda m, s=s: m(ids(s, 32)) for s in range(2)])
    return pair.result()


@pytest.mark.parametrize("axis", ["tp", pytest.param("pp", marks=pytest.mark.slow)])
def test_a_mask_that_no_fake_tensor_knows_breaks_the_graph(gloo2: Any, axis: str) -> None:
    results = gloo2(special, axis)
    assert furthest(r[kind] for r in results for kind in ("loss", "gradient")) < TOLERANCE


class Counting(nn.Module):
    """BatchNorm, a counter that is added to in place, and an average that is written through."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)
        self.norm = nn.BatchNorm1d(32)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("average", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(F.relu(self.norm(self.up(x))))
        if self.training:
            self.calls.add_(1)
            with torch.no_grad():
                self.average.mul_(0.9).add_(y.mean(0), alpha=0.1)
        return y.square().mean() + self.calls * 1e-3


def mutated(axis: str) -> dict[str, Any]:
    pair = Pair(Counting(), mesh={axis: 2})
    batches = [torch.randn(16, 8, generator=torch.Generator().manual_seed(s)) for s in range(3)]
    pair.train([lambda m, b=b: m(b) for b in batches])
    pair.model.eval()
    pair.serial.eval()
    with torch.no_grad():
        pair.forward(lambda m: m(batches[0]))
    wanted = dict(pair.serial.named_buffers())
    buffers = {k: whole(v) for k, v in pair.model.named_buffers()}
    worst = furthest(difference(b, wanted[k], 1.0) for k, b in buffers.items())
    return {
        **pair.result(),
        "buffers": worst,
        "values": {k: b.tolist() for k, b in buffers.items()},
    }


@pytest.mark.parametrize("axis", ["tp", "pp"])
def test_buffers_are_written_back_equal_on_all_ranks(gloo2: Any, axis: str) -> None:
    results = gloo2(mutated, axis)
    if axis == "tp":
        check(results)
    assert furthest(r[kind] for r in results for kind in ("loss", "gradient")) < TOLERANCE
    assert any(r["share"] for r in results), "no parameter is stored in parts"
    assert all(r["buffers"] < 1e-6 for r in results), results
    assert results[0]["values"] == results[1]["values"]
    assert results[0]["values"]["calls"] == 3


class Excluded(nn.Module):
    """All of it in a region that autocast around the call must not reach."""

    def __init__(self) -> None:
        super().__init__()
        self.body = MLP()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            return F.mse_loss(self.body(x), y)


def excluded(inner: str) -> dict[str, Any]:
    pair = Pair(Excluded(), inner=inner)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        pair.train([lambda m, s=s: m(**vectors(s)) for s in range(2)])
    return pair.result()


def test_a_region_without_autocast_inside_autocast(gloo2: Any) -> None:
    for inner in ("aot_eager", "eager"):
        check(gloo2(excluded, inner))


class GradientInside(nn.Module):
    """Turns gradients on for itself, as a model that differentiates its own energy does."""

    def __init__(self) -> None:
        super().__init__()
        self.body = MLP()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            return F.mse_loss(self.body(x), y)


def gradient_inside() -> dict[str, Any]:
    pair = Pair(GradientInside())

    def loss(model: Any) -> torch.Tensor:
        with torch.no_grad():
            return model(**vectors(0))

    pair.train([loss, loss])
    return pair.result()


def test_gradients_turned_on_inside_no_grad(gloo2: Any) -> None:
    check(gloo2(gradient_inside))


@pytest.mark.parametrize("use", [lambda x: x.tolist(), repr])
def test_a_read_between_two_graphs_is_eager(use: Callable[[torch.Tensor], Any]) -> None:
    called: list[str] = []

    def backend(gm: fx.GraphModule, inputs: Any) -> Any:
        called.extend(str(node.target) for node in gm.graph.nodes)
        return gm

    def between(x: torch.Tensor) -> Any:
        y = x * 1
        torch._dynamo.graph_break()
        return use(x), y

    compiled = torch.compile(between, backend=backend)
    run_ranks(1, lambda axis: compiled(lazy(torch.ones(2, 3), "S(0)", axis)))
    assert "<built-in function mul>" in called
    assert "full_tensor" not in called
