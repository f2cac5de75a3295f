"""Mixtures of experts are found from the structure of the graph, and give the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from autoshard.passes.base import Context
from autoshard.passes.match_experts import MatchExperts
from autoshard.program import Program
from autoshard.runtime.collectives.axis import Axis
from autoshard.runtime.operators import expert_body
from autoshard.runtime.operators.experts import EXPERTS, owned_experts
from autoshard.verification.program_check import verify_program
from models_plain import MIXTURES, Mixture
from traced import programs


def matched(program: Program) -> list[fx.Node]:
    return [node for node in program.serial.graph.nodes if node.target is EXPERTS]


def reasons(model: nn.Module, x: Tensor) -> list[str]:
    """Why the pass declined, once for each product; nothing may have been matched."""
    torch.compiler.reset()
    (program,), _ = programs(model, (x,), [{"mesh": {"tp": 2}}])
    assert not matched(program)
    report = MatchExperts().run(program.serial, Context(Axis("tp", 2, 0, "")))
    return [skip.reason for skip in report.skips]


@pytest.mark.parametrize("form", MIXTURES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mixture_is_one_node_and_keeps_every_bit(form: str, dtype: torch.dtype) -> None:
    model = Mixture(form, biases=form != "two").to(dtype)
    x = torch.randn(12, 8, dtype=dtype)
    (program,), values = programs(model, (x,), [{"mesh": {"tp": 2}}])
    (node,) = matched(program)
    assert len(node.args[3]) == len(list(model.parameters())) - 2  # the stacks; not the router

    wanted = model(x)
    wanted.square().sum().backward()
    inputs = [v.detach().clone().requires_grad_(v.requires_grad) for v in values]
    (found,) = program.serial(*inputs)[:1]
    found.square().sum().backward()
    assert torch.equal(found, wanted)
    names = [program.parameters.get(n) for n in program.serial.graph.find_nodes(op="placeholder")]
    for name, given in zip(names, inputs):
        if name is not None:
            assert torch.equal(given.grad, model.get_parameter(name).grad), name

    differences = verify_program(program, values)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    assert differences.worst_by_norm[1] < tolerance


class Changed(Mixture):
    """A mixture of which one thing is not as the matcher knows it."""

    def __init__(self, change: str) -> None:
        super().__init__("one")
        self.change = change
        self.scale = nn.Parameter(torch.ones(8))
        self.across = nn.Parameter(torch.ones(8, self.experts, 16))

    def routed(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        chosen, order = torch.sort(ids.reshape(-1), descending=self.change == "downwards")
        rows = x[order // self.k]
        top = self.experts - (2 if self.change == "counts" else 1)
        offs = torch.histc(chosen.float(), self.experts, 0, top).cumsum(0, dtype=torch.int32)
        up = self.product(rows, self.up, offs)
        if self.change == "turned":
            up = up + self.product(rows, self.across.transpose(0, 1), offs)
        if self.change == "mixes":
            up = up.softmax(0)
        out = self.product(up.relu(), self.down.transpose(-2, -1), offs)
        if self.change == "scale":
            out = out * self.scale
        out = out * weights.reshape(-1)[order].unsqueeze(-1)
        if self.change == "scatter":
            return torch.zeros_like(x).index_add(0, order // self.k, out)
        back = out[order if self.change == "order" else order.argsort()]
        back = back.view(x.shape[0], self.k, -1)
        return back.amax(1) if self.change == "amax" else back.sum(1)


@pytest.mark.parametrize(
    "change,said",
    [
        ("downwards", "not sorted by expert upwards"),
        ("counts", "does not count 4 experts one by one"),
        ("mixes", "softmax.int is not known to keep rows apart"),
        ("turned", "turns a stack so that its experts are not first"),
        ("scale", "joins the rows and"),
        ("scatter", "index_add.default joins the rows and"),
        ("order", "picks rows by something else than their first order"),
        ("amax", "the rows of a token are not summed"),
    ],
)
def test_what_is_no_mixture_stays_and_says_why(change: str, said: str) -> None:
    found = reasons(Changed(change), torch.randn(6, 8))
    assert len(found) >= 2 and all(said in one for one in found), found


def test_the_inverse_may_be_a_sort() -> None:
    (program,), _ = programs(Changed(""), (torch.randn(6, 8),), [{"mesh": {"tp": 2}}])
    assert len(matched(program)) == 1


class _Poisoned(torch.autograd.Function):
    """A grouped product as a GPU does it: rows that belong to no expert are whatever memory was."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, stack: Tensor, offs: Tensor) -> Tensor:
        ctx.save_for_backward(rows, stack, offs)
        return _poison(torch.ops.transformers.grouped_mm_fallback(rows, stack, offs), offs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        rows, stack, offs = ctx.saved_tensors
        backward = torch.ops.transformers.grouped_mm_fallback_backward
        rows, stack = backward(rows, stack, offs, grad)
        return _poison(rows, offs), stack, None


def _poison(rows: Tensor, offs: Tensor) -> Tensor:
    own = torch.arange(len(rows)).unsqueeze(-1) < offs[-1]
    return rows.where(own, torch.nan)


@pytest.mark.parametrize("ids", [[[0, 2], [2, 1], [0, 1]], [[3, 3]] * 3], ids=["uneven", "one"])
def test_rows_of_other_ranks_reach_no_value_and_no_gradient(
    ids: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank's share, with poison in what it does not compute, adds up to the whole; experts
    that nobody chose have a gradient of zeros."""
    model = Mixture("packed", biases=True)
    (program,), _ = programs(model, (torch.randn(3, 8),), [{"mesh": {"tp": 2}}])
    (node,) = matched(program)
    chosen, body = torch.tensor(ids), node.args[4]
    x, weights = torch.randn(3, 8, requires_grad=True), torch.rand(3, 2, requires_grad=True)
    placeholders = [program.parameters[stack] for stack in node.args[3]]
    stacks = [model.get_parameter(name) for name in placeholders]
    wanted = EXPERTS(x, chosen, weights, stacks, body)
    whole = torch.autograd.grad(wanted.square().sum(), [x, weights, *stacks])

    real: Callable[[str], Any] = expert_body._function

    def poisoned(name: str) -> Any:
        return _Poisoned.apply if "grouped" in name else real(name)

    monkeypatch.setattr(expert_body, "_function", poisoned)
    ranks = [Axis("tp", 2, rank, "") for rank in range(2)]
    parts = [
        owned_experts(x, chosen, weights, own, body, experts=4, axis=axis)
        for axis in ranks
        for own in [[stack.chunk(2)[axis.rank] for stack in stacks]]
    ]
    found = sum(parts)
    assert isinstance(found, Tensor)
    torch.testing.assert_close(found, wanted)
    got = torch.autograd.grad(found.square().sum(), [x, weights, *stacks])
    for mine, theirs in zip(got, whole):
        torch.testing.assert_close(mine, theirs)
    empty = [e for e in range(4) if e not in chosen]
    assert all((mine[e] == 0).all() for mine in got[2:] for e in empty)
