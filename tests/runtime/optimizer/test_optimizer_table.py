"""Optimizers on meshes: clipped steps of groups under a schedule beside one device, given the same
gradients; and their states on another mesh."""

from __future__ import annotations

import copy
import functools
import importlib.util
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from test_optimizer_on_parts import Lion
from test_owned_matrices import Preconditioned, StackedMuon, stored
from torch import nn, optim
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import autoshard
from autoshard.runtime.mesh import init_mesh
from joined_batch import Sizes
from side_by_side import whole

SHAPES = [(9, 4), (4, 12), (6, 6)]
VECTORS = [(6,), (5,)]


def of_package(module: str, name: str, **settings: Any) -> Any:
    return functools.partial(getattr(importlib.import_module(module), name), **settings)


#: How each is made, and how far from one device it may be: elementwise ones are equal to the bit.
OPTIMIZERS: dict[str, tuple[Any, float]] = {
    "AdamW foreach": (lambda: functools.partial(optim.AdamW, foreach=True), 0.0),
    "AdamW fused": (lambda: functools.partial(optim.AdamW, fused=True), 0.0),
    "SGD": (lambda: functools.partial(optim.SGD, momentum=0.9), 0.0),
    "Adafactor": (lambda: optim.Adafactor, 1e-5),
    "Lion": (lambda: Lion, 0.0),
    "Muon": (lambda: optim.Muon, 0.0),
    "stacked Muon": (lambda: StackedMuon, 0.0),
    "Shampoo": (lambda: Preconditioned, 0.0),
    "SOAP": (lambda: of_package("pytorch_optimizer", "SOAP", precondition_frequency=2), 1e-5),
    "LBFGS": (lambda: functools.partial(optim.LBFGS, max_iter=2), 1e-5),
    "NAdamW of timm": (lambda: of_package("timm.optim", "NAdamW"), 0.0),
}
NEEDS = {"SOAP": "pytorch_optimizer", "NAdamW of timm": "torchvision"}

MESHES: list[tuple[Sizes, list[dict[str, str]]]] = [
    ({"tp": 2}, [{"tp": "S(0)"}, {"tp": "S(1)"}, {}]),
    ({"dp_shard": 2}, [{"dp_shard": "S(0)"}]),
    ({"ep": 2}, [{"ep": "S(0)"}]),
    ({"pp": 2}, [{"pp": "H(0)"}, {"pp": "H(1)"}]),
    ({"dp_shard": 2, "tp": 2}, [{"dp_shard": "S(0)", "tp": "S(1)"}, {"dp_shard": "S(0)"}]),
]


class Held(nn.Module):
    """Parameters of matrices and vectors, plain or stored on a mesh."""

    def __init__(self, name: str, sizes: Sizes | None, placed: list[dict[str, str]]) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        self.mesh = None if sizes is None else init_mesh(sizes, "cpu")
        shapes = SHAPES if name in ("Muon", "Shampoo", "stacked Muon") else SHAPES + VECTORS
        for number, shape in enumerate(shapes):
            value = torch.randn(shape, generator=draw)
            p: Any = nn.Parameter(value)
            if self.mesh is not None:
                states = placed[number % len(placed)]
                fits = {a: s for a, s in states.items() if len(shape) > 1 or s != "S(1)"}
                p = stored(value, fits, self.mesh)
            self.register_parameter(f"p{number}", p)

    def optimizer(self, name: str) -> Any:
        """Groups of their own rates, but LBFGS, which has one."""
        make = OPTIMIZERS[name][0]()
        given = list(self.parameters())
        if name == "LBFGS":
            return autoshard.optimizer(make(given, lr=0.05))
        groups = [{"params": given[:2]}, {"params": given[2:], "lr": 0.01}]
        made = make(groups, lr=0.05)
        return made if self.mesh is None else autoshard.optimizer(made)

    def draw(self, step: int) -> None:
        """Gradients, those of a mesh in parts."""
        draw = torch.Generator().manual_seed(step + 1)
        for p in self.parameters():
            gradient = torch.randn(p.shape, generator=draw)
            p.grad = gradient if self.mesh is None else like_stored(gradient, p, self.mesh)


def like_stored(value: torch.Tensor, p: Any, mesh: Any) -> Any:
    from autoshard.runtime.parameters import stored_states

    return stored(value, stored_states(p), mesh)


def step(ours: Held, alone: Held, both: tuple[Any, Any], number: int) -> None:
    """One clipped step of each, on gradients that are the same to the bit."""
    for held in (ours, alone):
        held.draw(number)
    norms = [nn.utils.clip_grad_norm_(held.parameters(), 0.5) for held in (ours, alone)]
    torch.testing.assert_close(*norms)
    for p, q in zip(ours.parameters(), alone.parameters()):
        assert p.grad is not None and q.grad is not None
        torch.testing.assert_close(whole(p.grad), q.grad)
        q.grad = whole(p.grad).clone()
    closure = (lambda: torch.ones(()),) if isinstance(both[1], optim.LBFGS) else ()
    for optimizer in both:
        optimizer.step(*closure)


def compare(name: str, ours: Held, alone: Held) -> None:
    for p, q in zip(ours.parameters(), alone.parameters()):
        within = OPTIMIZERS[name][1]
        torch.testing.assert_close(whole(p.detach()), q.detach(), rtol=0, atol=within, msg=name)


def beside_one_device(sizes: Sizes, placed: list[dict[str, str]], names: list[str]) -> None:
    for name in names:
        ours, alone = Held(name, sizes, placed), Held(name, None, placed)
        both = ours.optimizer(name), alone.optimizer(name)
        schedules = [optim.lr_scheduler.ExponentialLR(one, 0.7) for one in both]
        for number in range(3):
            step(ours, alone, both, number)
            for schedule in schedules:
                schedule.step()
        compare(name, ours, alone)


def installed() -> list[str]:
    return [n for n in OPTIMIZERS if n not in NEEDS or importlib.util.find_spec(NEEDS[n])]


@pytest.mark.parametrize(
    ("sizes", "placed"),
    [
        pytest.param(*row, marks=[pytest.mark.slow] if len(row[0]) > 1 else [], id="-".join(row[0]))
        for row in MESHES
    ],
)
def test_clipped_steps_given_the_same_gradients(
    request: Any, sizes: Sizes, placed: list[dict[str, str]]
) -> None:
    pool = request.getfixturevalue(f"gloo{math.prod(sizes.values())}")
    pool(beside_one_device, sizes, placed, installed())


def resumed(folder: str) -> None:
    """States of one mesh on another one and on one device, through files of parts."""
    for name in ("AdamW foreach", "Muon", "Shampoo"):
        first, alone = Held(name, *MESHES[1]), Held(name, None, [])
        both = first.optimizer(name), alone.optimizer(name)
        for number in range(2):
            step(first, alone, both, number)
        file = f"{folder}/{name}"
        saved = get_optimizer_state_dict(first, both[0])
        dcp.save({"model": first.state_dict(), "optimizer": saved}, checkpoint_id=file)
        for row in (MESHES[0], (None, [])):
            other = Held(name, *row)
            optimizer = other.optimizer(name)
            state = {
                "model": other.state_dict(),
                "optimizer": get_optimizer_state_dict(other, optimizer),
            }
            dcp.load(state, checkpoint_id=file)
            other.load_state_dict(state["model"])
            set_optimizer_state_dict(other, optimizer, state["optimizer"])
            beside = Held(name, None, [])
            beside.load_state_dict({key: x.clone() for key, x in alone.state_dict().items()})
            its = beside.optimizer(name)
            its.load_state_dict(copy.deepcopy(both[1].state_dict()))
            step(other, beside, (optimizer, its), 2)
            compare(name, other, beside)


def test_states_resume_on_another_mesh_and_on_one_device(gloo2: Any, tmp_path: Path) -> None:
    gloo2(resumed, str(tmp_path))
