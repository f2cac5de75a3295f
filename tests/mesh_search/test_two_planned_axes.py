"""Meshes with cp and tp: tried, and where the model can have them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from autoshard.mesh_search.factorisations import combined
from autoshard.mesh_search.prices import MeshPrice, MeshSearch
from autoshard.mesh_search.search import search_meshes
from autoshard.planning.cost import cluster
from models_plain import Mixture

TOKENS = 4096
BOTH = {"cp", "tp"}


class Rows(nn.Module):
    """Layers of each token, in one sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.square().mean()


def search(model: nn.Module, x: torch.Tensor, **options: Any) -> MeshSearch:
    torch.compiler.reset()
    return search_meshes(model, (x,), world=4, hardware="h100", **options)


def test_both_are_tried() -> None:
    with torch.device("meta"):
        model, x = Rows(), torch.empty(1, TOKENS, 64)
    found = search(model, x, memory={"budget": 1000})
    (row,) = [row for row in found.rows if BOTH <= row.mesh.keys()]
    assert row.mesh == {"cp": 2, "tp": 2} and all(one.unfit for one in found.rows)
    (named,) = search(model, x, memory={"budget": 1000}, mesh=row.mesh).rows
    assert (row.memory, row.timing) == (named.memory, named.timing)


def test_a_search_does_not_know_the_lengths_of_those_before() -> None:
    class Heads(Rows):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            parts = self.layers[0](x).view(x.shape[0], x.shape[1], 4, -1)
            return super().forward(torch.tanh(parts).flatten(2))

    def row(length: int, dynamic: bool = False) -> MeshPrice:
        with torch.device("meta"):
            model, x = Heads(), torch.empty(1, length, 64)
        if dynamic:
            torch._dynamo.mark_dynamic(x, 1)
        mesh = {"cp": 2, "tp": 2}
        return search_meshes(model, (x,), world=4, hardware="h100", mesh=mesh).rows[0]

    torch.compiler.reset()
    first, _, again = row(2048), row(TOKENS), row(2048)
    assert (first.timing, first.memory, first.gap) == (again.timing, again.memory, again.gap)
    dynamic = row(2048, dynamic=True)  # which is planned one axis after the other
    assert dynamic.gap is None and dynamic.memory.parameters == first.memory.parameters


def test_a_mixture_of_experts_is_split_over_both() -> None:
    with torch.device("meta"):
        model, x = Mixture("packed", experts=4, hidden=64, inner=64), torch.empty(64, 64)
    found = search(model, x, memory={"budget": 1000})
    (row,) = [row for row in found.rows if BOTH <= row.mesh.keys()]
    (named,) = search(model, x, memory={"budget": 1000}, mesh=row.mesh).rows
    assert row.mesh == {"cp": 2, "tp": 2} and row.timing == named.timing
    assert not any({"ep", *BOTH} <= row.mesh.keys() for row in found.rows)


def test_cp_goes_across_nodes_where_tp_has_a_node_whole() -> None:
    meshes = combined(64, cluster("h100"))
    pairs = {(mesh["cp"], mesh["tp"]) for mesh in meshes if BOTH <= mesh.keys()}
    assert pairs == {(2, 2), (2, 4), (4, 2), (2, 8), (4, 8), (8, 8)}
    assert {"dp_shard": 4, "cp": 2, "tp": 8} in meshes
