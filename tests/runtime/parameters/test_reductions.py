"""Norms, sums and infinities of many stored tensors: right wherever each is split, and reduced in
one collective."""

from __future__ import annotations

import collections
import os
from typing import Any

import pytest
import torch
from torch import nn

from autoshard.runtime.compat import TorchDispatchMode
from autoshard.runtime.mesh import init_mesh
from autoshard.runtime.parameters.eager import StoredTensor, as_parameter, as_stored
from autoshard.runtime.parameters.layout import local_part, owned, wrap_local

SHAPES = {"whole": (3, 4), "rows": (5, 4), "columns": (2, 6), "short": (1, 3), "both": (9, 2)}


class Collectives(TorchDispatchMode):
    """The number of those that run while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self.seen[func.__name__] += 1
        return func(*args, **(kwargs or {}))


def drawn(sizes: dict[str, int]) -> list[list[nn.Parameter]]:
    """Plain parameters with gradients, and the same stored, each along other axes."""
    first, *others = sizes
    states: dict[str, dict[str, str]] = {
        "whole": {},
        "rows": {others[0] if others else first: "S(0)"},
        "columns": {first: "S(1)"},
        "short": {first: "S(0)"},
        "both": dict.fromkeys(sizes, "S(0)"),
    }
    mesh = init_mesh(sizes, "cpu")
    generator = torch.Generator().manual_seed(0)

    def stored(value: torch.Tensor, name: str) -> StoredTensor:
        part = owned(local_part(value, states[name], mesh.axes))
        assert mesh.device_mesh is not None
        return as_stored(wrap_local(part, value.shape, states[name], mesh.device_mesh))

    held: list[list[nn.Parameter]] = [[], []]
    for name, shape in SHAPES.items():
        value, gradient = torch.randn(2, *shape, generator=generator)
        held[0].append(nn.Parameter(value))
        held[1].append(as_parameter(stored(value, name), True))
        held[0][-1].grad, held[1][-1].grad = gradient.clone(), stored(gradient, name)
    return held


def clipped(sizes: dict[str, int]) -> None:
    """Norms of every order, by lists and one by one, are those of plain gradients."""
    for order in (2.0, 1.0, 3.0, float("inf")):
        for foreach in (None, False):
            plain, stored = drawn(sizes)
            want = nn.utils.clip_grad_norm_(plain, 0.5, order)
            with Collectives() as mode:
                found = nn.utils.clip_grad_norm_(stored, 0.5, order, foreach=foreach)
            torch.testing.assert_close(found, want)
            if foreach is None:
                assert mode.seen == {"allreduce_.default": 1}, (order, mode.seen)
            for p, q in zip(stored, plain):
                assert isinstance(p.grad, StoredTensor) and q.grad is not None
                torch.testing.assert_close(p.grad.full_tensor(), q.grad)


def scaled(sizes: dict[str, int]) -> None:
    """Every rank skips the step where a part of one rank has an infinity, wherever it is split."""
    rank, last = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]) - 1
    for poisoned in (None, *list(SHAPES)[1:]):
        _, stored = drawn(sizes)
        before = [p.detach().to_local().clone() for p in stored]  # type: ignore[attr-defined]
        if poisoned and rank == (0 if poisoned == "short" else last):
            gradient: Any = stored[list(SHAPES).index(poisoned)].grad
            gradient.to_local().view(-1)[-1] = float("inf")
        optimizer = torch.optim.SGD(stored, lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale(torch.ones(()))
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == (2.0 if poisoned else 4.0), poisoned
        same = [torch.equal(p.to_local(), q) for p, q in zip(stored, before)]  # type: ignore[operator]
        assert all(same) == bool(poisoned), poisoned


def logged(sizes: dict[str, int]) -> None:
    """What training scripts stack beside norms."""
    for make in (torch.sum, torch.mean, torch.amax, torch.amin, lambda g: torch.isfinite(g).all()):
        plain, stored = drawn(sizes)
        found, want = (torch.stack([make(p.grad) for p in held]) for held in (stored, plain))  # type: ignore[operator]
        torch.testing.assert_close(found, want)


@pytest.mark.parametrize("sizes", [{"tp": 2}, {"dp_shard": 2, "tp": 2}], ids=["tp", "two axes"])
@pytest.mark.parametrize("check", [clipped, scaled, logged])
def test_numbers_of_parts_are_those_of_wholes(request: Any, check: Any, sizes: Any) -> None:
    request.getfixturevalue("gloo4" if len(sizes) > 1 else "gloo2")(check, sizes)
