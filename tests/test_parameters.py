"""Sharded storage against the serial model, in two processes, through a backend of ten lines."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.distributed.tensor import DTensor

from autoshard.runtime import compat
from autoshard.runtime.materialize import materialize
from autoshard.runtime.mesh import Mesh, init_mesh
from autoshard.runtime.parameters import (
    related_parameters,
    shard_parameters,
)
from gloo_pool import GlooPool

State = dict[str, str]


def tp(size: int = 2) -> Mesh:
    return init_mesh({"tp": size}, "cpu")


def by_dim(parameter: nn.Parameter) -> State:
    """Rows where there are two dims, replicated biases, columns of anything else."""
    return {"tp": {1: "R", 2: "S(0)"}.get(parameter.dim(), "S(1)")}


def sharding_backend(
    gm: fx.GraphModule, example_inputs: Sequence[Any], *, log: list[str]
) -> Callable[..., Any]:
    """Store the parameters, ask for another trace, and run that as it is: materialize is exact."""
    inputs = compat.graph_inputs(gm)
    parameters = [i.real for i in inputs if isinstance(i.real, nn.Parameter)]
    whole = [p for p in related_parameters(parameters) if not isinstance(p, DTensor)]
    if whole:
        log.append("shard")
        moved = shard_parameters({p: by_dim(p) for p in whole}, tp(), broadcast=True)
        raise compat.RestartTrace(keep=moved)
    for item in inputs:
        assert (item.real is None) == item.source.isidentifier() or item.source.startswith("L[")
    calls = [n for n in gm.graph.nodes if n.op == "call_function" and n.target is materialize]
    log.append(f"run {len({n.args[0] for n in calls})} of {len(parameters)}")
    return gm.forward


def compiled_pair(make: Callable[[], nn.Module], rank: int) -> tuple[Any, ...]:
    """A serial model, its equal to be sharded, and the compiled one. Ranks start apart: rank 0's
    weights must reach rank 1."""
    torch.manual_seed(3)
    serial = make()
    torch.manual_seed(3 + rank)
    model = make()
    log: list[str] = []
    compiled = torch.compile(model, backend=functools.partial(sharding_backend, log=log))
    return serial, model, compiled, log


def whole(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_same(model: nn.Module, serial: nn.Module, tolerance: float = 1e-6) -> None:
    """Values and gradients of every parameter, by name."""
    expected = dict(serial.named_parameters())
    assert [n for n, _ in model.named_parameters()] == list(expected)
    for name, p in model.named_parameters():
        torch.testing.assert_close(whole(p), expected[name], rtol=tolerance, atol=tolerance)
        if expected[name].grad is None:
            assert p.grad is None, name
        else:
            assert isinstance(p.grad, DTensor) == isinstance(p, DTensor), name
            torch.testing.assert_close(
                whole(p.grad), expected[name].grad, rtol=tolerance, atol=tolerance, msg=name
            )


def local_fraction(model: nn.Module) -> float:
    parameters = list(model.parameters())
    local = sum(compat.local_of(p).numel() for p in parameters if isinstance(p, DTensor))
    return local / sum(p.numel() for p in parameters)


class Mixed(nn.Module):
    """Tied, frozen, unused, listed and root parameters, an uneven dim, and a graph break."""

    def __init__(self, broken: bool = False) -> None:
        super().__init__()
        self.broken = broken
        self.embed = nn.Embedding(11, 8)
        self.scale = nn.Parameter(torch.randn(8, 8))
        self.listed = nn.ParameterList([nn.Parameter(torch.randn(8, 8)) for _ in range(2)])
        self.named = nn.ParameterDict({"shift": nn.Parameter(torch.randn(8))})
        self.norm = nn.LayerNorm(8)
        self.frozen = nn.Linear(8, 7)
        self.back = nn.Linear(7, 8)
        self.unused = nn.Linear(3, 4)
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
        self.frozen.requires_grad_(False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) @ self.scale
        for weight in self.listed:
            x = x + torch.tanh(x @ weight)
        x = self.norm(x + self.named["shift"])
        if self.broken:
            torch._dynamo.graph_break()
        if not self.training:
            x = x * 2
        return self.head(x + self.back(torch.relu(self.frozen(x))))


def loss_of(model: Callable[..., torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
    out = model(ids)
    return F.cross_entropy(out.flatten(0, 1), ids.flatten())


def batch(step: int, rows: int = 4) -> torch.Tensor:
    return torch.randint(11, (rows, 5), generator=torch.Generator().manual_seed(step))


def train(
    model: Callable[..., torch.Tensor], parameters: Any, optimizer: Any, step: int, rows: int = 4
) -> tuple[float, float]:
    optimizer.zero_grad()
    loss = loss_of(model, batch(step, rows))
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(parameters, 0.5)
    optimizer.step()
    return loss.item(), float(whole(norm))


def adamw(parameters: Any) -> torch.optim.Optimizer:
    # a large eps: with the default, gradients near 0 turn rounding into whole steps
    return torch.optim.AdamW(parameters, lr=0.05, eps=1e-3, foreach=True)


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
        assert all(a == f"run {b} of {b}" for a in log[1:] for b in [a.split()[-1]]), log
        assert 0.5 < fraction < 0.7
