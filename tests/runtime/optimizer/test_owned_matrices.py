"""Matrices that one rank steps: beside one device with the same gradients, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.utils import _pytree as pytree

import autoshard
from autoshard.runtime.mesh import init_mesh
from autoshard.runtime.parameters import local_part, stored_states, wrap_local
from autoshard.runtime.parameters.eager.stored_tensor import as_parameter, as_stored
from joined_batch import Sizes

SHAPES = [(9, 4), (4, 12), (6, 6), (1, 5)]


class Preconditioned(optim.Optimizer):
    """Shampoo's matrices of rows and columns, in a list, renewed every second step."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["step"] = 0
                    state["statistics"] = [torch.eye(n) * 1e-3 for n in p.shape]
                    state["roots"] = [torch.eye(n) for n in p.shape]
                    state["rotated"] = torch.zeros_like(p)
                state["step"] += 1
                rows, columns = state["statistics"]
                rows.add_(p.grad @ p.grad.T)
                columns.add_(p.grad.T @ p.grad)
                if state["step"] % 2:
                    for number, x in enumerate((rows, columns)):
                        values, vectors = torch.linalg.eigh(x)
                        state["roots"][number] = (vectors * values**-0.25) @ vectors.T
                state["rotated"].lerp_(state["roots"][0] @ p.grad, 0.5)
                p.sub_(state["rotated"] @ state["roots"][1], alpha=group["lr"])


def stored(whole: torch.Tensor, states: Any, mesh: Any) -> Any:
    part = local_part(whole, states, mesh.axes).clone()
    return as_parameter(as_stored(wrap_local(part, whole.shape, states, mesh.device_mesh)), True)


def beside_one_device(
    sizes: Sizes,
    placed: list[dict[str, str]],
    cls: Any,
    settings: list[dict[str, Any]],
    within: float = 0.0,
) -> list[Any]:
    """Steps on a mesh, and on one device, of the same parameters and gradients."""
    mesh = init_mesh(sizes, "cpu")
    found = []
    for chosen in settings:
        draw = torch.Generator().manual_seed(0)
        alone = [nn.Parameter(torch.randn(s, generator=draw)) for s in SHAPES for _ in placed]
        each = [states for _ in SHAPES for states in placed]
        held = [stored(p.detach(), states, mesh) for p, states in zip(alone, each)]
        optimizer, serial = autoshard.optimizer(cls(held, **chosen)), cls(alone, **chosen)
        for _ in range(3):
            for p, q in zip(held, alone):
                q.grad = torch.randn(q.shape, generator=draw)
                p.grad = stored(q.grad, stored_states(p), mesh)
            optimizer.step()
            serial.step()
        matrices = optimizer.__dict__["_autoshard_parts"].owned
        assert len(matrices) == len(held)
        for p, q in zip(held, alone):
            torch.testing.assert_close(p.detach().full_tensor(), q.detach(), rtol=0, atol=within)
            whole = pytree.tree_map_only(type(p), lambda x: x.full_tensor(), optimizer.state[p])
            torch.testing.assert_close(whole, serial.state[q], rtol=0, atol=within)
        found.append([(m.owner, m.sharers.own, m.work) for m in matrices])
    return found


MUON: list[dict[str, Any]] = [
    {"lr": 0.05},
    {"lr": 0.05, "nesterov": False, "weight_decay": 0.3, "adjust_lr_fn": "match_rms_adamw"},
]
TWO = [
    ({"dp_shard": 2}, [{"dp_shard": "S(0)"}]),
    ({"tp": 2}, [{"tp": "S(0)"}, {"tp": "S(1)"}, {"tp": "I"}]),
    ({"dp_replicate": 2}, [{}]),
    ({"pp": 2}, [{"pp": "H(0)"}, {"pp": "H(1)"}]),
]

FOUR = [
    (
        {"dp_shard": 2, "tp": 2},
        [{"dp_shard": "S(0)", "tp": "S(0)"}, {"dp_shard": "S(0)", "tp": "S(1)"}],
    ),
    ({"dp_replicate": 2, "tp": 2}, [{"tp": "S(1)"}, {"tp": "S(0)"}]),
    ({"pp": 2, "dp_shard": 2}, [{"pp": "H(0)", "dp_shard": "S(0)"}, {"pp": "H(1)"}]),
]


@pytest.mark.parametrize(("sizes", "placed"), TWO)
def test_steps_on_two_ranks_are_those_of_one_device(gloo2: Any, sizes: Sizes, placed: Any) -> None:
    gloo2(beside_one_device, sizes, placed, optim.Muon, MUON)
    gloo2(beside_one_device, sizes, placed, Preconditioned, [{"lr": 0.05}])


@pytest.mark.slow
@pytest.mark.parametrize(("sizes", "placed"), TWO[:1])
def test_soap_of_a_package(gloo2: Any, sizes: Sizes, placed: Any) -> None:
    soap = pytest.importorskip("pytorch_optimizer").SOAP
    chosen = {"lr": 0.05, "precondition_frequency": 2}
    # LAPACK's factors are columns on one device, and rows where a state is stored
    gloo2(beside_one_device, sizes, placed, soap, [chosen], 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("sizes", "placed"), FOUR)
def test_steps_on_four_ranks_are_those_of_one_device(gloo4: Any, sizes: Sizes, placed: Any) -> None:
    gloo4(beside_one_device, sizes, placed, optim.Muon, MUON)
    gloo4(beside_one_device, sizes, placed, Preconditioned, [{"lr": 0.05}])
