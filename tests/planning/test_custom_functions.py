"""torch.autograd.Function: sharded where both of its bodies run on shards, beside serial."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoshard.building.pipeline.batch_split import split_batch
from autoshard.planning.rules import strategies
from autoshard.planning.rules.custom_functions import CUSTOM_FUNCTION
from autoshard.runtime.collectives import I, R, S
from steps import error, serial_step, sharded_step
from traced import programs

# Dynamo itself makes an object of the class
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


class Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 0.5 * (1 + torch.tanh(0.79 * x * (1 + 0.044 * x * x)))

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        t = torch.tanh(0.79 * x * (1 + 0.044 * x * x))
        return g * (0.5 * x * (1 - t * t) * (0.79 + 0.104 * x * x) + 0.5 * (1 + t))


class Norm(torch.autograd.Function):
    """Of the last dim, with a weight, whose gradient is a sum over all others."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        scale = x.pow(2).mean(-1, keepdim=True).add(1e-6).rsqrt()
        ctx.save_for_backward(x, weight, scale)
        return x * scale * weight

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, weight, scale = ctx.saved_tensors
        normal, inner = x * scale, g * weight
        straight = inner - normal * (inner * normal).mean(-1, keepdim=True)
        return straight * scale, (g * normal).sum((0, 1))


class Turned(torch.autograd.Function):
    """A straight-through sum along dim 1, which backward forgets."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.cumsum(1)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g * 2


class Sized(torch.autograd.Function):
    """The sizes of its operand are numbers in its body."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view(4, 8, 8, 8).exp().view(4, 8, 64)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g * torch.ones(4, 8, 64)


class Drawn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x + torch.rand_like(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g * 3


class Net(nn.Module):
    def __init__(self, function: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.rand(32) + 0.5)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> tuple[Tensor]:
        x = self.up(Norm.apply(x, self.weight))
        return (self.down(self.function.apply(x)).square().mean(),)


def calls(program: Any) -> list[torch.fx.Node]:
    return [node for node in program.serial.graph.nodes if node.target is CUSTOM_FUNCTION]


def test_a_step_on_shards_is_the_serial_one() -> None:
    found, values = programs(
        Net(Gelu), (torch.randn(4, 8, 32),), [{"mesh": {"tp": n}} for n in (2, 3, 4)]
    )
    for program in found:
        norm, gelu = calls(program)
        assert program.decisions.strategies[gelu].inputs == (S(2),), "between two products"
        assert {one.inputs for one in strategies(norm, 2)[0]} == {
            (I, I),
            (S(0), R),
            (S(1), R),
        }, "each sample by itself, and the weight's gradient in parts"
        got, want = sharded_step(program, values), serial_step(program, values)
        torch.testing.assert_close(got.loss, want.loss)
        assert error(got, want) < 1e-5


@pytest.mark.parametrize(
    ("function", "inputs", "reason"),
    [
        (Turned, {(I,), (S(0),), (S(2),)}, "aten.cumsum.default of its body takes S(1)"),
        (Sized, {(I,)}, "aten.view.default of its body"),
        (Drawn, {(I,)}, "aten.rand_like.default of its body"),
    ],
)
def test_what_a_body_does_not_do_to_shards(
    function: type[torch.autograd.Function], inputs: set[Any], reason: str
) -> None:
    (program,), values = programs(Net(function), (torch.randn(4, 8, 32),), [{"mesh": {"tp": 2}}])
    offered, reasons = strategies(calls(program)[1], 2)
    assert {one.inputs for one in offered} == inputs
    assert any(reason in one for one in reasons), reasons
    if function is not Drawn:
        got, want = sharded_step(program, values), serial_step(program, values)
        assert error(got, want) < 1e-5


def test_micro_batches() -> None:
    """pp asks the same rules whether samples meet."""
    (program,), _ = programs(Net(Gelu), (torch.randn(4, 8, 32),), [{"mesh": {"tp": 2}}])
    nodes = [node for node in program.serial.graph.nodes if node.op == "placeholder"]
    batch = [node for node in nodes if node not in program.parameters]
    split = split_batch(
        program.serial, set(program.parameters), dict.fromkeys(batch, S(0)), microbatches=2
    )
    assert all(split.state(call.next) == S(0) for call in calls(program))
