"""Mixtures of experts on processes: rows that travel to their experts, and the axis ep."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoshard.planning.mixtures import WAYS, is_mixture, way_of
from autoshard.planning.plan import GraphPlan, Plan, strategy_text
from autoshard.planning.planner import fingerprint
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


def train_exchanging(inner: str, lopsided: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Layers(lopsided)
    batches = [torch.randn(24, 8) for _ in range(3)]
    plan = exchanging(model, batches[0])
    pair = Pair(model, mesh={"tp": 2}, plan=plan, inner=inner)
    pair.train([lambda m, x=x: m(x) for x in batches])
    return {"loss": pair.loss, "gradient": pair.gradient, "share": pair.share()}


@pytest.mark.parametrize(
    ("inner", "lopsided"),
    [("aot_eager", True), pytest.param("inductor", False, marks=pytest.mark.slow)],
)
def test_rows_travel_to_their_experts(gloo2: Any, inner: str, lopsided: bool) -> None:
    for found in gloo2(train_exchanging, inner, lopsided):
        assert found["loss"] < 1e-5 and found["gradient"] < 1e-5, found
