"""float8_products: a mesh computes what one device does with the same option, scale by scale."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autoshard.config import Config
from autoshard.errors import ConfigError
from autoshard.planning.plan import GraphPlan, Plan
from autoshard.program import Program
from autoshard.runtime.graph_meta import FLOAT8
from autoshard.runtime.operators.float8 import (
    FLOAT8_LINEAR,
    FLOAT8_RECIPES,
    scaled_product,
    widened_product,
)
from autoshard.verification.program_check import verify_program
from models_hf import llama
from side_by_side import whole
from traced import programs

T = torch.Tensor


class Block(nn.Module):
    """float64, so that rounding to float8 falls alike wherever sums are in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.up, self.down = nn.Linear(64, 96), nn.Linear(96, 64, bias=False)
        self.head = nn.Linear(64, 16)
        self.double()

    def forward(self, x: T) -> T:
        x = x + self.down(F.gelu(self.up(self.norm(x))))
        out: T = self.head(x)
        return out


def products(program: Program) -> list[str]:
    return [node.name for node in program.serial.graph.nodes if node.target is FLOAT8_LINEAR]


def batch(*shape: int) -> T:
    """Its largest entry is in one corner, of one rank."""
    x = torch.randn(shape, dtype=torch.float64)
    x.view(-1)[-1] = 30.0
    return x


STATES = {
    "column and row": ("R, S(0) -> S(2)", "S(2), S(1) -> P"),
    "row and column": ("S(2), S(1) -> P", "R, S(0) -> S(2)"),
    "sequence": ("S(1), R -> S(1)", "S(1), R -> S(1)"),
    "batch": ("S(0), R -> S(0)", "S(0), R -> S(0)"),
}


@pytest.mark.parametrize("recipe", FLOAT8_RECIPES)
def test_each_split_of_tp_is_the_serial_program(recipe: str) -> None:
    """A scale of a part only, of any operand, would be an error of a hundredth and more."""
    x, options = batch(2, 6, 64), {"mesh": {"tp": 2}, "precision": {"matmul": recipe}}
    plans = []
    (first,), _ = programs(Block(), (x,), [options])
    (key,) = first.plan.graphs
    for states in STATES.values():
        texts = [f"{each} by split_float8_linear" for each in states]
        nodes = dict(zip(products(first), texts, strict=True))
        plans.append(Plan("tp", 2, {}, {key: GraphPlan(nodes, {})}))
    made, values = programs(Block(), (x,), [{**options, "plan": plan} for plan in plans])
    for name, program in zip(STATES, made):
        strategies = program.decisions.strategies
        nodes = {node.name: strategies[node] for node in strategies if node.target is FLOAT8_LINEAR}
        assert all(one.impl is not None for one in nodes.values()), name
        assert verify_program(program, values).worst[1] < 1e-9, name
        maxima = [
            one for one in program.collectives() if one.op == "all_reduce" and one.bytes < 999
        ]
        assert maxima, name


@pytest.mark.parametrize("recipe", FLOAT8_RECIPES)
def test_data_ranks_scale_by_their_own_batch(recipe: str) -> None:
    options = {"mesh": {"dp_shard": 2, "tp": 2}, "precision": {"matmul": recipe}}
    (program,), values = programs(Block(), (batch(2, 4, 64),), [options])
    other = [torch.randn_like(v) if v.dim() == 3 else v for v in values]
    assert verify_program(program, values, others=[other]).worst[1] < 1e-9


@pytest.mark.parametrize("recipe", FLOAT8_RECIPES)
def test_the_operator_is_the_product_of_rounded_numbers(recipe: str) -> None:
    """Beside a product written out, whose rows are no multiple of 16; a kernel is told the same."""
    x, w = torch.randn(5, 32, requires_grad=True), torch.randn(48, 32, requires_grad=True)
    g = torch.randn(5, 48)
    rows = recipe == "float8_rowwise"

    def rounded(t: T, dtype: torch.dtype = torch.float8_e4m3fn) -> T:
        amax = t.detach().abs().amax(-1, keepdim=True) if rows else t.detach().abs().amax()
        scale = torch.finfo(dtype).max / amax
        scale = scale.log2().floor().exp2() if rows else scale
        return (t.detach() * scale).to(dtype).float() / scale

    out = FLOAT8_LINEAR(x, w, recipe)
    out.backward(g)
    wide = torch.float8_e4m3fn if rows else torch.float8_e5m2
    assert x.grad is not None and w.grad is not None
    torch.testing.assert_close(out, rounded(x) @ rounded(w).t())
    torch.testing.assert_close(x.grad, rounded(g, wide) @ rounded(w.t()).t())
    torch.testing.assert_close(w.grad, rounded(g.t(), wide) @ rounded(x.t()).t())
    assert (out - x @ w.t()).norm() / out.norm() < 0.06


def test_what_is_left_says_why() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.odd, self.even = nn.Linear(32, 24), nn.Linear(24, 32)
            self.turned = nn.Parameter(torch.randn(32, 16))
            self.even2, self.head = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: T) -> T:
            x = torch.addmm(x.new_zeros(16), self.even(self.odd(x)), self.turned)
            out: T = self.head(self.even2(x) @ x.t() @ x)
            return out

    model, x = Mixed(), torch.randn(16, 32)
    options = {"mesh": {"tp": 1}, "precision": {"matmul": "float8"}}
    (program,), values = programs(model, (x,), [options])
    assert len(products(program)) == 2
    reasons = sorted(one.reason for one in program.serial.meta[FLOAT8] if one.reason)
    assert reasons == [
        "the last product makes logits",
        "weight of 24 x 32: no multiples of 16",
        "weight of 32 x 24: no multiples of 16",
    ]
    text = program.explain(width=160)
    assert "in float8" in text and "no multiples of 16" in text
    with torch.no_grad():
        (quiet,), _ = programs(model, (x,), [options])
    assert not products(quiet) and "evaluation is in the model's dtype" in quiet.explain(width=160)
    torch.testing.assert_close(quiet.serial(*values)[0], model(x))


@pytest.mark.parametrize("axis", ["cp", "ep", "pp"])
def test_axes_that_it_does_not_know_are_refused(axis: str) -> None:
    options: dict[str, Any] = {"mesh": {axis: 2}, "precision": {"matmul": "float8"}}
    with pytest.raises(ConfigError, match=axis):
        programs(Block(), (batch(2, 4, 64),), [options])


def test_names_of_recipes_are_checked() -> None:
    with pytest.raises(ConfigError, match="matmul to 'float8' or 'float8_rowwise'"):
        Config(precision={"matmul": "float4"})


def test_a_llama_is_near_itself() -> None:
    """The loss of a Llama in float8 beside its own in float32, and sharded beside serial."""
    model = llama(hidden_size=64, intermediate_size=128, num_hidden_layers=2)().double()
    ids = torch.randint(0, 64, (2, 16))

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = copy.deepcopy(model)

        def forward(self, ids: T) -> T:
            loss: T = self.model(input_ids=ids, labels=ids).loss
            return loss

    options = [{"mesh": {"tp": 2}, "precision": {"matmul": recipe}} for recipe in FLOAT8_RECIPES]
    made, values = programs(Loss(), (ids,), options)
    exact = model(input_ids=ids, labels=ids).loss.detach()
    for recipe, program in zip(FLOAT8_RECIPES, made):
        assert len(products(program)) == 14  # seven a layer
        error = float((program.serial(*values)[0].detach() - exact).abs() / exact)
        worst = verify_program(program, values).worst
        print(f"{recipe}: relative error of the loss {error:.1e}; sharded from serial {worst}")
        assert 0 < error < 5e-3
        assert worst[1] < 1e-5


def trained(sizes: dict[str, int]) -> list[T]:
    """A step's gradients, through the backend."""
    torch.manual_seed(0)
    model, x = Block(), batch(2, 6, 64)
    options = {"mesh": sizes, "inner": "aot_eager", "precision": {"matmul": "float8"}}
    compiled: Any = torch.compile(model, backend="autoshard", options=options)
    compiled(x).square().mean().backward()
    return [whole(p.grad) for p in model.parameters()]


def test_processes_have_the_gradients_of_one_device(gloo2: Any) -> None:
    """One device, too, builds a program for the option."""
    wanted = trained({"tp": 1})
    torch.manual_seed(0)
    plain, x = Block(), batch(2, 6, 64)
    plain(x).square().mean().backward()
    for found in gloo2(trained, {"tp": 2}):
        for got, want, exact in zip(found, wanted, plain.parameters()):
            assert exact.grad is not None
            torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
            assert (got - exact.grad).norm() > 1e-4 * exact.grad.norm()


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_kernel_that_gpus_run_is_the_emulation(rows: bool, dtype: torch.dtype) -> None:
    """torch has the kernel for CPUs too: operands, scales and layouts mean the same to it."""
    a = torch.randn(32, 64).to(torch.float8_e4m3fn if rows else torch.float8_e5m2)
    b = torch.randn(48, 64).to(torch.float8_e4m3fn)
    scales = (torch.rand(32, 1), torch.rand(1, 48)) if rows else (torch.rand(()), torch.rand(()))
    found = [each(a, b, *scales, dtype, False) for each in (scaled_product, widened_product)]
    assert found[0].dtype == dtype
    coarse = rows or dtype == torch.bfloat16
    torch.testing.assert_close(*found, rtol=1e-2 if coarse else 1e-5, atol=1e-1 if coarse else 1e-4)
