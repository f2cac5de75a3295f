"""A backend of ten lines on sharded storage, and a model with every kind of parameter."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.distributed.tensor import DTensor

from autoshard.runtime import compat
from autoshard.runtime.mesh import Mesh, init_mesh
from autoshard.runtime.parameters.owners import related_parameters
from autoshard.runtime.parameters.shard import shard_parameters
from autoshard.runtime.parameters.unsharding import unshard_parameter

State = dict[str, str]


def tp(size: int = 2) -> Mesh:
    return init_mesh({"tp": size}, "cpu")


def by_dim(parameter: nn.Parameter) -> State:
    """Rows where there are two dims, replicated biases, columns of anything else."""
    return {"tp": {1: "I", 2: "S(0)"}.get(parameter.dim(), "S(1)")}


def sharding_backend(
    gm: fx.GraphModule, example_inputs: Sequence[Any], *, log: list[str], options: Any = None
) -> Callable[..., Any]:
    """Store the parameters, ask for another trace, and run that: unshard_parameter is exact."""
    inputs = compat.graph_inputs(gm)
    parameters = [i.real for i in inputs if isinstance(i.real, nn.Parameter)]
    whole = [p for p in related_parameters(parameters) if not isinstance(p, DTensor)]
    if whole:
        log.append("shard")
        moved = shard_parameters({p: by_dim(p) for p in whole}, tp(), broadcast=True)
        raise compat.RestartTrace(keep=moved)
    for item in inputs:
        assert (item.real is None) == item.source.isidentifier() or item.source.startswith("L[")
    calls = [n for n in gm.graph.nodes if n.op == "call_function" and n.target is unshard_parameter]
    log.append(f"run {len({n.args[0] for n in calls})} of {len(parameters)}")
    return gm.forward


def stand_in(log: list[str]) -> Callable[..., Any]:
    """`sharding_backend` as Dynamo traces for our own backend: stored parameters are read whole."""
    backend = functools.partial(sharding_backend, log=log)
    compat.trace_as_ours(backend)
    return backend


def compiled_pair(make: Callable[[], nn.Module], rank: int) -> tuple[Any, ...]:
    """A serial model, its equal to be sharded, and the compiled one. Ranks start apart: rank 0's
    weights must reach rank 1."""
    torch.manual_seed(3)
    serial = make()
    torch.manual_seed(3 + rank)
    model = make()
    log: list[str] = []
    options = {"mesh": {"tp": 2}}  # on which the optimizer may step before the first call
    compiled = torch.compile(model, backend=stand_in(log), options=options)
    return serial, model, compiled, log


def whole(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_same(model: nn.Module, serial: nn.Module, tolerance: float = 1e-6) -> None:
    """Values and gradients of every parameter, by name."""
    close: Any = functools.partial(
        torch.testing.assert_close, rtol=tolerance, atol=tolerance, equal_nan=True
    )
    expected = dict(serial.named_parameters())
    assert [n for n, _ in model.named_parameters()] == list(expected)
    for name, p in model.named_parameters():
        close(whole(p), expected[name], msg=name)
        if expected[name].grad is None:
            assert p.grad is None, name
        else:
            assert isinstance(p.grad, DTensor) == isinstance(p, DTensor), name
            close(whole(p.grad), expected[name].grad, msg=name)


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


def adamw(parameters: Any) -> torch.optim.Optimizer:
    # a large eps: with the default, gradients near 0 turn rounding into whole steps
    return torch.optim.AdamW(parameters, lr=0.05, eps=1e-3, foreach=True)


def sharded_mixed(seed: int = 0) -> Mixed:
    torch.manual_seed(seed)
    model = Mixed().eval()
    shard_parameters({p: by_dim(p) for p in model.parameters()}, tp(), broadcast=True)
    return model
