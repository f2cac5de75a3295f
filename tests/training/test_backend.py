"""The backend against the serial model: loss and every gradient, three optimizer steps."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autoshard.errors import AutoshardError
from autoshard.runtime.lazy_gather import LazyGather
from autoshard.verification.comparison import furthest
from models import CASES
from models_plain import MLP, Regression, vectors
from side_by_side import Pair, check, difference, whole

SHARDED = ["llama", "gpt2", "bert", "t5", "vit", "mixtral"]
PATIENCE = 600.0  # seconds for a model, on a machine that has other things to do
# A Mistral has a Llama's operators, a RoBERTa a BERT's; test_optimizers trains the MLP.
OTHERS = [name for name in CASES if name not in [*SHARDED, "mistral", "roberta", "mlp"]]


def train(names: list[str], tp: int, inner: str) -> dict[str, dict[str, Any]]:
    """Three optimizer steps of each case."""
    results = {}
    for name in names:
        case = CASES[name]
        pair = Pair(case.make_model(), tp, inner)
        batches = [case.make_batch(step) for step in range(3)]
        pair.train([functools.partial(case.loss, batch=batch) for batch in batches])
        results[name] = pair.result()
        torch.compiler.reset()
    return results


def check_each(results: list[dict[str, dict[str, Any]]], share: float) -> None:
    for name in results[0]:
        try:
            check([r[name] for r in results], share)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name in ("t5", "vit", "mixtral") else [])
        for name in SHARDED
    ],
)
def test_three_steps_equal_serial_tp2(gloo2: Any, name: str) -> None:
    check_each(gloo2(train, [name], 2, "aot_eager", pool_timeout=PATIENCE), share=0.9)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_three_steps_equal_serial_tp4(gloo4: Any, name: str) -> None:
    """A whole graph and one in parts; on tp=4 the others' gradients are compared with the serial
    ones in one process, by tests/verification/test_verification.py."""
    check_each(gloo4(train, [name], 4, "aot_eager", pool_timeout=PATIENCE), share=0.9)


def test_three_steps_with_inductor(gloo2: Any) -> None:
    check_each(gloo2(train, ["llama"], 2, "inductor", pool_timeout=PATIENCE), share=0.9)


@pytest.mark.slow
def test_three_steps_with_inductor_in_parts(gloo2: Any) -> None:
    check_each(gloo2(train, ["gpt2"], 2, "inductor", pool_timeout=PATIENCE), share=0.9)


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_other_models(gloo2: Any, name: str) -> None:
    check_each(gloo2(train, [name], 2, "aot_eager", pool_timeout=PATIENCE), share=0.0)


def optimizers(make: str, when: str, **settings: Any) -> dict[str, Any]:
    """Clipped steps of an optimizer made before the first call, after it, or used before it."""
    torch.manual_seed(0)
    model = Regression(MLP())
    pair = Pair(model)

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        if make == "sgd":
            return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, **settings)
        # the default eps turns gradients near 0 into whole steps
        return torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3, **settings)

    both: list[torch.optim.Optimizer] = []
    if when != "after":
        both = [optimizer(pair.model), optimizer(pair.serial)]
    if when == "used":  # state of whole tensors, which must be split with its parameter
        for module in (pair.model, pair.serial):
            module(**vectors(9)).backward()
        for one in both:
            one.step()
            one.zero_grad()
    for step in range(3):
        pair.backward(lambda m, s=step: m(**vectors(s)))
        pair.compare_gradients()
        both = both or [optimizer(pair.model), optimizer(pair.serial)]
        norms = [
            whole(nn.utils.clip_grad_norm_(m.parameters(), 0.1)) for m in (pair.model, pair.serial)
        ]
        assert abs(norms[0] - norms[1]) < 1e-5 * norms[1], norms
        for one in both:
            one.step()
            one.zero_grad()
    wanted = dict(pair.serial.named_parameters())
    values = furthest(difference(p, wanted[k]) for k, p in pair.model.named_parameters())
    state = [
        (type(value).__name__, value.to_local().shape == p.to_local().shape)
        for p in pair.model.parameters()
        for key, value in both[0].state[p].items()
        if key != "step"
    ]
    return {**pair.result(), "values": values, "state": state}


@pytest.mark.parametrize(
    ("make", "when", "settings"),
    [
        ("adamw", "before", {"foreach": True}),
        ("adamw", "used", {"fused": True}),
        ("adamw", "after", {"fused": True}),
        ("sgd", "used", {"foreach": True}),
    ],
)
def test_optimizers(gloo2: Any, make: str, when: str, settings: dict[str, Any]) -> None:
    results = gloo2(optimizers, make, when, **settings)
    check(results, share=0.9)
    for result in results:
        assert result["values"] < 1e-5, result
        assert result["state"] and all(s == ("StoredTensor", True) for s in result["state"]), result


def frozen_and_unused() -> dict[str, Any]:
    """A frozen base, and a branch that never runs."""
    model = Regression(MLP())
    model.body.up.requires_grad_(False)
    model.unused = nn.Linear(64, 64)
    pair = Pair(model)
    pair.train([lambda m, s=s: m(**vectors(s)) for s in range(2)])
    assert all(p.grad is None for p in model.body.up.parameters())
    kinds = {type(p.data).__name__ for p in model.parameters()}
    return {**pair.result(), "kinds": sorted(kinds), "keys": sorted(model.state_dict())}


def test_frozen_and_unused_parameters(gloo2: Any) -> None:
    results = gloo2(frozen_and_unused)
    check(results, share=0.9)
    assert results[0]["kinds"] == ["StoredTensor"], "an unused weight stayed plain"
    assert results[0]["keys"] == sorted(
        f"{m}.{k}" for m in ("body.up", "body.down", "unused") for k in ("weight", "bias")
    )


def load_after() -> dict[str, Any]:
    """Weights of serial, loaded into the sharded model after its first call."""
    pair = Pair(Regression(MLP()))
    pair.train([lambda m: m(**vectors(0))])
    other = Regression(MLP())
    pair.model.load_state_dict(other.state_dict())
    pair.serial.load_state_dict(other.state_dict())
    pair.train([lambda m: m(**vectors(1))])
    copied = copy.deepcopy(pair.model)
    want = pair.serial(**vectors(2))
    return {**pair.result(), "copy": difference(copied(**vectors(2)), want)}


def test_load_state_dict_after_the_first_call(gloo2: Any) -> None:
    results = gloo2(load_after)
    check(results, share=0.9)
    assert all(r["copy"] < 1e-6 for r in results)


def initial_weights(how: str) -> list[float]:
    """The loss with weights drawn from another seed on every rank, and the loss of rank 0's."""
    import os

    losses = []
    for seed in (int(os.environ["RANK"]), 0):
        torch.manual_seed(seed)
        model = Regression(MLP())
        if not losses:
            options = {"mesh": {"tp": 2}, "inner": "aot_eager", "same_inputs": {"weights": how}}
            model = torch.compile(model, backend="autoshard", options=options)
        losses.append(float(model(**vectors(0)).detach()))
    return losses


def test_initial_weights(gloo2: Any) -> None:
    for got, want in gloo2(initial_weights, "broadcast"):
        assert abs(got - want) < 1e-6 * want
    trusted = gloo2(initial_weights, "trust")
    assert trusted[0][0] == trusted[1][0], "the ranks are one model"
    assert abs(trusted[0][0] - trusted[0][1]) > 1e-4, "trusted halves of two models"


def single(inner: str) -> dict[str, Any]:
    """One process: what plain torch.compile compiles, and nothing else."""
    graphs: list[str] = []

    def recording(gm: Any, example_inputs: Any) -> Any:
        graphs.append(gm.print_readable(print_output=False))
        return gm

    model = Regression(MLP())
    batch = vectors(0)
    torch.compile(model, backend=recording)(**batch)
    torch.compiler.reset()
    from autoshard import backend

    original = backend.compile_local
    backend.compile_local = lambda gm, fakes, inner, **_: recording(gm, fakes)
    try:
        compiled = torch.compile(model, backend="autoshard", options={"inner": inner})
        loss = compiled(**batch)
    finally:
        backend.compile_local = original
    loss.backward()
    return {
        "equal": len(graphs) == 2 and graphs[0] == graphs[1],
        "kinds": sorted({type(p).__name__ for p in model.parameters()}),
        "classes": type(model.body.up) is nn.Linear,
        "started": torch.distributed.is_initialized(),
    }


def test_a_world_of_one_adds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    result = single("eager")
    assert result["equal"] and result["classes"], result
    assert result["kinds"] == ["Parameter"] and not result["started"], result


class Telling(nn.Module):
    """Gives a row of each sample, one value of all of them, and its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(512, 2048)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rows = self.up(x).relu()
        return rows, rows.mean(), self.up.weight


def test_outputs_that_are_split_whole_or_stored(world_of_four: None) -> None:
    """Each is handed out in its own way: in part, as it is, and as a copy that is watched."""
    compiled, x = {}, torch.ones(64, 512)
    for axis in ("tp", "dp_shard"):
        options = {"mesh": {axis: 4}, "inner": "aot_eager"}
        compiled[axis] = torch.compile(Telling(), backend="autoshard", options=options)
    rows, mean, _ = compiled["tp"](x)
    assert isinstance(rows, LazyGather)
    assert (rows.shape, rows._local.shape) == ((64, 2048), (64, 512))
    assert type(mean) is torch.Tensor and mean.shape == ()
    *others, weight = compiled["dp_shard"](x)
    assert {type(other) for other in others} == {torch.Tensor}  # of this rank's own batch
    with torch.no_grad():
        weight.mul_(2)
    with pytest.raises(AutoshardError, match=r"wrote to up\.weight, which the graph had handed"):
        compiled["dp_shard"](x)


# torch's own, at the import of Inductor
@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")
def test_a_world_of_one_trains_with_every_inner_compiler() -> None:
    for inner in ("eager", "aot_eager", "inductor"):
        torch.compiler.reset()
        pair = Pair(Regression(MLP()), tp=1, inner=inner)
        pair.train([lambda m, s=s: m(**vectors(s)) for s in range(2)])
        assert pair.loss < 1e-5 and pair.gradient < 1e-5, (inner, pair.where)
        assert not any(isinstance(p, DTensor) for p in pair.model.parameters())
