"""Meshes with an axis ep among those that are tried."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autoshard.mesh_search.search import MeshSearch, search_meshes
from models_plain import Mixture


def search(model: type[nn.Module], *args: Any, mesh: Any = None, **kwargs: Any) -> MeshSearch:
    torch.compiler.reset()
    with torch.device("meta"):
        made, x = model(*args, **kwargs), torch.empty(4096, 256)
        return search_meshes(made, (x,), world=4, hardware="h100", mesh=mesh)


@pytest.mark.parametrize(("experts", "sizes"), [(8, {2, 4}), (3, {2})])
def test_ep_is_tried_where_rows_can_travel(experts: int, sizes: set[int]) -> None:
    found = search(Mixture, "packed", experts=experts, hidden=256, inner=8192)
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
