"""What compiling leaves in the process: nothing for other backends, nothing of a dead model."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import autoshard
from autoshard.capture import guards

OPTIONS = {"inner": "aot_eager", "mesh": {"tp": 1}, "rng": "tracker"}  # a program of one rank


def recurrent() -> Any:
    """Dynamo remembers of a function that it could not trace it: each call makes a new one."""
    rnn = nn.GRU(4, 4)
    return exec_new("return rnn(x)[0]", rnn=rnn)


def leaf() -> Any:
    return exec_new("made = torch.zeros(4); made.requires_grad = True; return x + made")


def exec_new(body: str, **names: Any) -> Any:
    exec(f"def call(x): {body}", space := {"torch": torch, **names})
    return space["call"]


@pytest.mark.parametrize("make", [recurrent, leaf])
def test_other_backends_trace_as_torch_does(make: Any) -> None:
    x, ours = torch.randn(2, 4), make()
    compiled = torch.compile(ours, backend="autoshard", fullgraph=True, options=OPTIONS)
    torch.testing.assert_close(compiled(x), ours(x))
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(make(), backend="eager", fullgraph=True)(x)
    assert torch._dynamo.config.allow_rnn is False


class Cast(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        with torch.autocast("cpu", enabled=False):
            return super().forward(x.float())


def test_autocast_of_the_caller_is_that_of_the_graph() -> None:
    """Its casts are in the graph: around that, the caller's would cast what a region leaves."""
    model, x = Cast(4, 4), torch.randn(2, 4)
    compiled = torch.compile(model, backend="autoshard", options=OPTIONS | {"inner": "eager"})
    for enabled in (True, False):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            torch.testing.assert_close(compiled(x), model(x))


class Enabling(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            return super().forward(x)


def test_a_region_with_gradients_in_a_caller_without() -> None:
    model, x = Enabling(4, 4), torch.randn(2, 4)
    compiled = torch.compile(model, backend="autoshard", options=OPTIONS | {"inner": "eager"})
    with torch.no_grad():
        found, want = compiled(x), model(x)
    torch.testing.assert_close(found, want)
    assert found.requires_grad and want.requires_grad


def trained(width: int) -> tuple[nn.Module, Any, weakref.ref[autoshard.Program]]:
    model = nn.Linear(4, width)
    step = torch.compile(model, backend="autoshard", options=OPTIONS)
    step(torch.randn(2, 4)).sum().backward()
    (program,) = autoshard.programs(model)
    return model, step, weakref.ref(program)


def test_a_program_dies_with_its_model() -> None:
    model, step, program = trained(4)
    other, other_step, alive = trained(5)
    del model, step
    gc.collect()
    assert program() is None
    assert autoshard.programs(other) == [alive()] == autoshard.programs()


def test_a_function_outlives_the_model_it_was_compiled_for() -> None:
    models = [nn.Linear(4, 4) for _ in range(2)]
    steps = [torch.compile(model, backend="autoshard", options=OPTIONS) for model in models]
    steps[0](torch.randn(2, 4))  # its backward is to be compiled by another model of the class
    del models[0], steps[0]
    gc.collect()
    steps[0](torch.randn(2, 4)).sum().backward()
    assert models[0].weight.grad is not None


def test_a_program_dies_when_the_compiler_is_reset() -> None:
    model, step, program = trained(4)
    torch.compiler.reset()
    gc.collect()
    assert program() is None and autoshard.programs() == []
    step(torch.randn(2, 4)).sum().backward()
    assert len(autoshard.programs(model)) == 1


def test_what_is_known_of_a_function_dies_with_it() -> None:
    for _ in range(2):  # torch keeps the first code object that it compiles
        model = nn.Module()
        model.forward = exec_new("return (x + 1).relu()")
        code = weakref.ref(model.forward.__code__)
        autoshard.trace(model, (torch.randn(2, 4),), mesh={"tp": 2})
        assert code() in guards._split_sizes
        del model
        torch.compiler.reset()
        gc.collect()
    assert code() is None
