"""Mixtures of experts trained on processes: three steps of each family beside its serial model."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import mixture_families
from autoshard.planning import fingerprint
from autoshard.planning.mixtures import is_mixture
from autoshard.planning.plan import without_ep
from joined_batch import Sizes, train
from mixture_families import FAMILIES, family
from model_case import Batch, Case
from models import CASES
from traced import builder

LOOPS = ("Loop", "PickingLoop", "Bounded")


def ids(step: int) -> Batch:
    """Tokens of four sequences."""
    generator = torch.Generator().manual_seed(step)
    return {"ids": torch.randint(0, 64, (4, 8), generator=generator)}


def vectors(step: int) -> Batch:
    """Vectors of 64 tokens."""
    return {"x": torch.randn(64, 8, generator=torch.Generator().manual_seed(step))}


def case(name: str) -> Case:
    """A family, or a user's loop, and its batches; the model's result is the loss."""
    if name in LOOPS:
        return Case(name, getattr(mixture_families, name), vectors, loss)
    return Case(name, lambda: family(name, torch.float32), ids, loss)


def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    found: torch.Tensor = model(*batch.values())
    return found


def train_mixture(
    name: str, sizes: Sizes, options: dict[str, Any], adam: bool = False
) -> dict[str, Any]:
    torch.compiler.reset()
    with mock.patch.dict(CASES, {name: case(name)}):
        return train(name, sizes, (1, 1, 1), options, adam=adam)


def train_by_plan(name: str, sizes: Sizes) -> dict[str, Any]:
    """The first mixture's weights travel over ep, and the second's rows, as a plan file says."""
    torch.compiler.reset()
    one = case(name)
    batch = {key: value[:2] for key, value in one.make_batch(0).items()}
    program = builder(one.make_model(), tuple(batch.values()))(sizes)
    plan = program.decisions.graph_plan()
    mixtures = [node.name for node in program.serial.graph.nodes if is_mixture(node)]
    for node, way in zip(mixtures, ("weights", "rows"), strict=True):
        plan.nodes[node] = f"{without_ep(plan.nodes[node])}, {way} over ep"
    with tempfile.TemporaryDirectory() as folder:
        replace(program.plan, graphs={fingerprint(program.serial): plan}).save(f"{folder}/plan")
        found = train_mixture(name, sizes, {"plan": f"{folder}/plan"}, adam=True)
    told = {**plan.nodes}
    return {**found, "ways": [told[node].rpartition(", ")[2] for node in mixtures]}


MESHES: dict[str, Sizes] = {
    "tp": {"tp": 2},
    "ep": {"ep": 2},
    "dp_shard, ep": {"dp_shard": 2, "ep": 2},
    "ep, tp": {"ep": 2, "tp": 2},
}
QUICK = (("gpt_oss", "ep"),)  # biases, which are added to rows that have travelled
CASES_OF_MESHES = [
    *((name, "dp_shard, ep") for name in (*FAMILIES, *LOOPS)),
    *((name, "tp") for name in ("gpt_oss", "deepseek_v3", "Bounded")),
    *((name, "ep") for name in ("gpt_oss", "PickingLoop")),
    *((name, "ep, tp") for name in ("qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss")),
]


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        pytest.param(name, mesh, marks=[] if (name, mesh) in QUICK else pytest.mark.slow)
        for name, mesh in CASES_OF_MESHES
    ],
)
def test_three_steps(gloo2: Any, gloo4: Any, name: str, mesh: str) -> None:
    pool = gloo4 if len(MESHES[mesh]) == 2 else gloo2
    for found in pool(train_mixture, name, MESHES[mesh], {"planner": {"ep_exchange": "rows"}}):
        for kind in ("loss", "gradient", "norm", "parameter"):
            assert found[kind] < 1e-5, found


CHOICES = [
    (name, mesh, way)
    for name in ("qwen3_moe", "mixtral")
    for mesh in ("ep", "ep, tp")
    for way in ("rows", "weights", "auto", "plan")
]


@pytest.mark.parametrize(
    ("name", "mesh", "way"),
    [
        pytest.param(*one, marks=[] if one == ("qwen3_moe", "ep", "plan") else pytest.mark.slow)
        for one in CHOICES
    ],
)
def test_clipped_adamw_whatever_travels_over_ep(
    gloo2: Any, gloo4: Any, name: str, mesh: str, way: str
) -> None:
    pool = gloo4 if len(MESHES[mesh]) == 2 else gloo2
    if way == "plan":
        results = pool(train_by_plan, name, MESHES[mesh])
        assert {tuple(one["ways"]) for one in results} == {("weights over ep", "rows over ep")}
    else:
        results = pool(train_mixture, name, MESHES[mesh], {"planner": {"ep_exchange": way}}, True)
    for found in results:
        for kind in ("loss", "gradient", "norm", "parameter"):
            assert found[kind] < 1e-5, found
