"""`autoshard plan` with zero="auto": each mesh is planned, those with pp and ep too.

Meshes with an axis ep among those that are tried.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from autoshard.mesh_search import MeshSearch, search_meshes
from autoshard.planning.estimate import Training
from autoshard.runtime.collectives import ONCE, TWICE, WHOLE
from models_plain import Mixture


class Layers(nn.Module):
    """Products, or mixtures of experts between them."""

    def __init__(self, experts: bool) -> None:
        super().__init__()
        layers = [nn.Linear(8, 8, bias=False) for _ in range(4)]
        self.layers = nn.ModuleList([*layers[:2], Mixture("interleaved"), *layers[2:]])
        if not experts:
            del self.layers[2]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The mean of squares."""
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.square().mean()


@pytest.mark.parametrize(
    ("mesh", "stays"),
    [({"pp": 2, "dp_shard": 4}, ""), ({"dp_shard": 2, "ep": 2}, ""), ({"ep": 4}, WHOLE)],
)
def test_a_mesh_is_priced_with_its_choices(mesh: dict[str, int], stays: str) -> None:
    model, x = Layers("ep" in mesh), torch.randn(24, 8)
    given = {"world": math.prod(mesh.values()), "mesh": mesh, "hardware": "h100"}
    training = Training(microbatches=2)
    given["planner"] = {"ep_exchange": "rows"}
    (row,) = search_meshes(model, (x,), training=training, zero="auto", **given).rows
    weights = row.plan.weights
    assert weights.keys() == dict(model.named_parameters()).keys() and row.fits
    if "pp" in mesh:
        assert set(weights.values()) == {ONCE} and row.microbatches == 4
        torch.compiler.reset()
        (zero,) = search_meshes(model, (x,), training=training, zero=3, **given).rows
        assert row.timing == zero.timing and row.memory == zero.memory
    else:
        assert all(
            (name == "layers.2.up") <= (choice == (stays or choice))
            for name, choice in weights.items()
        )
        assert {ONCE, TWICE} & set(weights.values())


def test_a_budget_is_that_of_a_stage_not_of_the_graph_that_is_planned() -> None:
    """What is planned is the whole graph, of which each stage holds half."""
    given = {"world": 8, "mesh": {"pp": 2, "dp_shard": 2, "tp": 2}, "hardware": "h100"}
    found = []
    for memory in (None, 8_000, 4_000):
        torch.compiler.reset()
        options = {"zero": "auto", "memory": memory, **given}
        found += search_meshes(Layers(experts=False), (torch.randn(24, 8),), **options).rows
    assert {str(row.plan.parameters) for row in found} == {str(found[0].plan.parameters)}
    assert [row.fits for row in found] == [True, True, False]


def search(
    model: type[nn.Module], *args: Any, mesh: Any = None, rows: int = 4096, **kwargs: Any
) -> MeshSearch:
    torch.compiler.reset()
    with torch.device("meta"):
        made, x = model(*args, **kwargs), torch.empty(rows, 256)
        return search_meshes(made, (x,), world=4, hardware="h100", mesh=mesh)


@pytest.mark.parametrize(("experts", "sizes"), [(8, {2, 4}), (3, {2})])
def test_ep_is_tried_where_rows_can_travel(experts: int, sizes: set[int]) -> None:
    found = search(Mixture, "packed", rows=512, experts=experts, hidden=256, inner=8192)
    rows = [row for row in found.rows if "ep" in row.mesh]
    assert {row.mesh["ep"] for row in rows} == sizes
    assert {tuple(row.mesh) for row in rows} >= {("dp_shard", "ep"), ("dp_replicate", "ep")}
    for row in rows:
        assert row.timing.traffic["ep"].nbytes > 0 and row.plan.mesh == row.mesh
    whole = next(row for row in found.rows if row.mesh == {"dp_shard": 4})
    best = min(rows, key=lambda row: row.timing.step)
    assert best.timing.step < whole.timing.step  # stacks of 25 MB an expert stay where they are


def test_ep_is_not_tried_where_weights_are_cheaper_unless_it_is_asked_for() -> None:
    """Stacks of 3 MB an expert travel to 4096 tokens, as on dp_shard."""
    found = search(Mixture, "packed", experts=8, hidden=256, inner=512)
    assert all("ep" not in row.mesh for row in found.rows)
    (row,) = search(Mixture, "packed", experts=8, hidden=256, inner=512, mesh={"ep": 4}).rows
    (graph,) = row.plan.graphs.values()
    assert sum("weights over ep" in line for line in graph.nodes.values()) == 1


def test_ep_is_not_tried_without_experts_unless_it_is_asked_for() -> None:
    assert all("ep" not in row.mesh for row in search(nn.Linear, 256, 256).rows)
    (row,) = search(nn.Linear, 256, 256, mesh={"ep": 4}).rows
    assert row.timing.traffic["ep"].nbytes > 0
