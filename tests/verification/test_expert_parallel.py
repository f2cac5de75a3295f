"""Mixtures of experts on processes: rows that travel to their experts, and the axis ep."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from autoshard.planning.mixtures import WAYS, is_mixture, way_of
from autoshard.planning.plan import GraphPlan, Plan, strategy_text
from autoshard.planning.search.asked import fingerprint
from joined_batch import Sizes, check, train
from model_case import Batch, Case
from models import CASES
from models_plain import Mixture
from side_by_side import Pair
from traced import builder


class Layers(nn.Module):
    """Two mixtures; the first one's router prefers one expert by far where `lopsided`."""

    def __init__(self, lopsided: bool = False) -> None:
        super().__init__()
        self.before = nn.Linear(8, 8, bias=False)
        self.first, self.second = Mixture("packed", k=1), Mixture("interleaved", biases=True)
        if lopsided:
            with torch.no_grad():
                self.first.router.bias[0] += 100.0

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.second(self.first(self.before(x))).square().mean()
        return found


def exchanging(model: nn.Module, x: Tensor, ways: Sequence[str], mesh: Sizes) -> Plan:
    """The plan for tp=2 that splits the mixtures in these ways, and says no more."""
    program = builder(model, (x,))(mesh, planner={"ep_exchange": "rows"})
    mixtures = [node for node in program.serial.graph.nodes if is_mixture(node)]
    nodes = {
        node.name: strategy_text(one)
        for node, way in zip(mixtures, ways, strict=True)
        for one in program.decisions.offered[node]
        if way_of(one) == way
    }
    assert len(nodes) == 2
    torch.compiler.reset()
    return Plan("tp", 2, graphs={fingerprint(program.serial): GraphPlan(nodes)})


def train_exchanging(inner: str, lopsided: bool, dtype: torch.dtype) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Layers(lopsided).to(dtype)
    batches = [torch.randn(24, 8, dtype=dtype) for _ in range(3)]
    plan = exchanging(model, batches[0], [WAYS[3]] * 2, {"tp": 2})
    pair = Pair(model, mesh={"tp": 2}, plan=plan, inner=inner)
    pair.train([lambda m, x=x: m(x) for x in batches])
    return {"loss": pair.loss, "gradient": pair.gradient, "share": pair.share()}


@pytest.mark.parametrize(
    ("inner", "lopsided", "dtype", "tolerance"),
    [
        ("aot_eager", True, torch.float32, 1e-5),
        ("aot_eager", True, torch.bfloat16, 5e-2),  # whose kernels refuse products over no row
        pytest.param("inductor", False, torch.float32, 1e-5, marks=pytest.mark.slow),
    ],
)
def test_rows_travel_to_their_experts(
    gloo2: Any, inner: str, lopsided: bool, dtype: torch.dtype, tolerance: float
) -> None:
    """Lopsided: one rank gets all rows of the first mixture, and the other none."""
    for found in gloo2(train_exchanging, inner, lopsided, dtype):
        assert found["loss"] < tolerance and found["gradient"] < tolerance, found


def train_on_two_axes(inner: str) -> dict[str, Any]:
    """Experts split over tp and ep; then rows that travel over tp, and from there over ep."""
    sizes = {"ep": 2, "tp": 2}
    torch.manual_seed(0)
    model = Layers()
    batch = torch.randn(24, 8)
    plan = exchanging(model, batch, (WAYS[0], WAYS[3]), sizes)
    case = Case("Layers", Layers, batch_of, lambda model, batch: model(*batch.values()))
    with mock.patch.dict(CASES, {"Layers": case}):
        return train("Layers", sizes, (1, 1, 1), {"plan": plan, "inner": inner})


def batch_of(step: int) -> Batch:
    """Vectors of the tokens of both ranks of ep."""
    return {"x": torch.randn(48, 8, generator=torch.Generator().manual_seed(step))}


@pytest.mark.slow
def test_rows_travel_on_two_axes_in_inductors_code(gloo4: Any) -> None:
    for found in gloo4(train_on_two_axes, "inductor"):
        kinds = ("loss", "gradient", "norm", "parameter")
        assert all(found[kind] < 1e-5 for kind in kinds), found


@pytest.mark.parametrize(
    ("sizes", "micro", "zero"),
    [
        ({"ep": 2}, (1, 1, 1), 3),
        pytest.param({"ep": 2}, (3, 3), 1, marks=pytest.mark.slow),
        pytest.param({"dp_shard": 2, "ep": 2}, (1, 1, 1), 3, marks=pytest.mark.slow),
        pytest.param({"dp_shard": 2, "ep": 2}, (3, 3), 1, marks=pytest.mark.slow),
        pytest.param({"dp_replicate": 2, "ep": 2}, (3, 3), 2, marks=pytest.mark.slow),
    ],
)
def test_steps_on_ep(gloo2: Any, gloo4: Any, sizes: Sizes, micro: Sizes, zero: int) -> None:
    """Steps of SGD with momentum and clipping, each rank on its part of the batch; microbatches
    but the last of a step in `no_sync`."""
    pool = gloo4 if len(sizes) == 2 else gloo2
    options = {"zero": zero, "planner": {"ep_exchange": "rows"}}
    results = pool(train, "mixtral", sizes, micro, options, wait=len(set(micro)) > 1)
    split = sizes["ep"] * sizes.get("dp_shard", 1)
    check(results, split)
