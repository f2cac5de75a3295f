"""Mixtures of experts on processes: rows that travel to their experts, and the axis ep."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoshard.planning.mixtures import WAYS, is_mixture, way_of
from autoshard.planning.plan import GraphPlan, Plan, strategy_text
from autoshard.planning.planner import fingerprint
from joined_batch import Sizes, check, train
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


def exchanging(model: nn.Module, x: Tensor) -> Plan:
    """The plan for tp=2 that splits tokens and experts of every mixture, and says no more."""
    program = builder(model, (x,))({"tp": 2})
    nodes = {
        node.name: strategy_text(one)
        for node in program.serial.graph.nodes
        if is_mixture(node)
        for one in program.decisions.offered[node]
        if way_of(one) == WAYS[3]
    }
    assert len(nodes) == 2
    torch.compiler.reset()
    return Plan("tp", 2, graphs={fingerprint(program.serial): GraphPlan(nodes)})


def train_exchanging(inner: str, lopsided: bool, dtype: torch.dtype) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Layers(lopsided).to(dtype)
    batches = [torch.randn(24, 8, dtype=dtype) for _ in range(3)]
    plan = exchanging(model, batches[0])
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
    results = pool(train, "mixtral", sizes, micro, {"zero": zero}, wait=len(set(micro)) > 1)
    split = sizes["ep"] * sizes.get("dp_shard", 1)
    check(results, split)
