"""What a changed parameter compiles anew, and what is served by the program that is there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import autoshard
from autoshard import backend
from autoshard.runtime.compat import dynamo as compat_dynamo
from autoshard.runtime.compat import frames as compat_frames

LENGTH = 4


class Scaled(nn.Module):
    """Reads a property of its own, which the backend knows nothing of."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(LENGTH, LENGTH) for _ in range(3))
        self.steps = 1

    @property
    def scale(self) -> float:
        return float(self.steps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x * self.scale


@pytest.fixture
def trained() -> Iterator[tuple[nn.Module, Callable[[], int]]]:
    """A stored model after one step, and what runs another one: the programs there are then."""
    dist.init_process_group("fake", rank=0, world_size=2)
    model = Scaled()
    options = {"mesh": {"dp_shard": 2}, "inner": "aot_eager", "timeout": 20}
    compiled = torch.compile(model, backend="autoshard", options=options)

    def step() -> int:
        x = torch.ones(2, LENGTH, dtype=next(model.parameters()).dtype)
        model.zero_grad()
        compiled(x).sum().backward()
        return len(autoshard.programs(model))

    assert step() == 1
    yield model, step
    dist.destroy_process_group()


def renewed(parameter: Any) -> nn.Parameter:
    """An equal parameter, in another object with another spec."""
    local = parameter.to_local().detach().clone()
    like = {"shape": parameter.shape, "stride": parameter.stride()}
    placed = DTensor.from_local(local, parameter.device_mesh, parameter.placements, **like)
    return nn.Parameter(placed, parameter.requires_grad)


def test_one_guard_a_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    created: list[str] = []
    original = compat_frames._guard_parameter

    def watched(check: Any, builder: Any, guard: Any) -> None:
        created.append(guard.name)
        original(check, builder, guard)

    monkeypatch.setattr(compat_frames, "_guard_parameter", watched)
    dist.init_process_group("fake", rank=0, world_size=2)
    try:
        model = Scaled()
        options = {"mesh": {"dp_shard": 2}, "inner": "aot_eager", "timeout": 20}
        torch.compile(model, backend="autoshard", options=options)(torch.ones(2, LENGTH))
    finally:
        dist.destroy_process_group()
    assert len(set(created)) == len(list(model.parameters()))


def test_equal_parameters_share_a_spec(trained: Any) -> None:
    model, _ = trained
    assert len({id(layer._parameters["weight"]._spec) for layer in model.layers}) == 1


def test_the_same_storage_is_served(trained: Any) -> None:
    model, step = trained
    assert step() == 1
    layer = model.layers[1]
    layer._parameters["weight"] = renewed(layer._parameters["weight"])
    assert step() == 1
    assert layer._parameters["weight"].grad is not None


def test_freezing_and_thawing(trained: Any) -> None:
    model, step = trained
    bias = model.layers[1]._parameters["bias"]
    bias.requires_grad_(False)
    assert step() == 2 and bias.grad is None
    bias.requires_grad_(True)
    assert step() == 2 and bias.grad is not None


def test_another_dtype(trained: Any) -> None:
    model, step = trained
    weight = model.layers[0]._parameters["weight"]
    model.cpu()
    assert step() == 1
    weight.grad.to_local().fill_(0.5)  # what a collective of a fake group leaves may be NaN
    gradient, value = weight.grad.to_local().double(), weight.to_local().double()
    model.double()
    assert weight is model.layers[0]._parameters["weight"] and weight.dtype == torch.float64
    assert torch.equal(weight.to_local(), value)
    assert torch.equal(weight.grad.to_local(), gradient)
    assert step() == 2
    assert weight.grad.dtype == torch.float64


def test_a_parameter_that_is_whole_again(trained: Any) -> None:
    model, step = trained
    model.layers[2]._parameters["bias"] = nn.Parameter(torch.zeros(LENGTH))
    assert step() == 2
    assert isinstance(model.layers[2]._parameters["bias"], DTensor)


def test_a_parameter_that_is_gone(trained: Any) -> None:
    model, step = trained
    model.layers[2]._parameters["bias"] = None
    assert step() == 2


def test_what_the_model_reads_itself_is_guarded(trained: Any) -> None:
    model, step = trained
    model.steps = 3
    assert step() == 2
    model.steps = 1
    assert step() == 2


class Asking(nn.Linear):
    """Asks for the method of its class."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x if type(self).forward is ASKED else -x)


ASKED = Asking.forward


class Reads(Scaled):
    """Asks more of a parameter than its value, or of a class with parameters, by what is named."""

    factor = 2.0

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.kept = what, None
        self.shift = nn.Parameter(torch.zeros(LENGTH))
        if "classes" in what:
            self.layers = nn.ModuleList(Asking(LENGTH, LENGTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> Any:
        weight = self.layers[0].weight
        if self.what == "keeps":
            self.kept = weight
        if self.what == "asks" and weight.grad is not None:
            x = x + 1
        if "class" in self.what:
            x = x * self.factor + self.shift
        x = super().forward(x)
        return (x, weight) if self.what == "returns" else x


@pytest.mark.parametrize(
    ("what", "traces"),
    [
        *([("reads", 1), ("reads of its class", 1), ("returns", 2), ("keeps", 2), ("asks", 2)]),
        *([("reads, as if it returned", 2), ("reads in no_sync", 2), ("reads of its classes", 1)]),
    ],
)
def test_one_trace_serves_plain_and_stored_parameters(
    monkeypatch: pytest.MonkeyPatch, what: str, traces: int
) -> None:
    if compat_frames.skips_tensors():  # torch 2.11 has guards for a second trace only
        if what == "keeps":
            pytest.skip("torch 2.11 traces no parameter that a module keeps")
        traces = 2
    graphs: list[Any] = []
    compiled_once = backend._compile

    def compiling(gm: Any, *rest: Any) -> Any:
        graphs.append(gm)
        return compiled_once(gm, *rest)

    monkeypatch.setattr(backend, "_compile", compiling)
    if "as if" in what:
        monkeypatch.setattr(compat_dynamo, "_escapes", lambda tx: True)
    dist.init_process_group("fake", rank=0, world_size=2)
    try:
        model, x = Reads(what), torch.ones(2, LENGTH)
        mesh = {"dp_replicate": 2} if "no_sync" in what else {"tp": 2}
        options = {"mesh": mesh, "inner": "aot_eager", "timeout": 20}
        compiled = torch.compile(model, backend="autoshard", options=options)
        with autoshard.no_sync(model) if "no_sync" in what else contextlib.nullcontext():
            found = [compiled(x), compiled(x)]
        assert len(graphs) == traces
        (program,) = autoshard.programs(model)
        if "reads" in what:
            other = autoshard.trace(Reads(what), (x,), mesh=mesh, inner="aot_eager")
            assert program.plan.text() == other.plan.text()
            nodes = [
                [(n.op, n.name, n.meta["val"].shape) for n in [*one.serial.graph.nodes][:-1]]
                for one in (program, other)
            ]
            assert nodes[0] == nodes[1]
        if what == "returns":
            assert all(one[1].shape == (LENGTH, LENGTH) for one in found)
    finally:
        dist.destroy_process_group()
