"""A deep model is searched by a few of its layers; what is proposed of axes together."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx, nn

from autoshard.capture import capture, intercept
from autoshard.compiling import lowered_dtypes
from autoshard.config import Config
from autoshard.mesh_search import MeshSearch, equal_layers, search_meshes
from autoshard.mesh_search.equal_layers import Layers, Screened, shallow
from autoshard.mesh_search.prices import Asked
from autoshard.mesh_search.search import planned_axes, prices_of, search_captured
from autoshard.planning.cost import cluster
from autoshard.planning.estimate import Training
from autoshard.runtime import compat

Axes = dict[str, int]
H100 = replace(cluster("h100"), per_node=2)
WIDTH, TOKENS = 512, 2048


class Gated(nn.Module):
    """Equal layers of each token."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(layers))
        self.up = nn.ModuleList(nn.Linear(WIDTH, 2 * WIDTH) for _ in range(layers))
        self.gate = nn.ModuleList(nn.Linear(WIDTH, 2 * WIDTH) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(layers))
        self.head = nn.Linear(WIDTH, 4 * WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(x)
        for norm, up, gate, down in zip(self.norms, self.up, self.gate, self.down):
            inner = norm(x)
            x = x + torch.tanh(down(torch.sigmoid(gate(inner)) * torch.tanh(up(inner))))
        return self.head(x).square().mean()


def made(layers: int) -> tuple[nn.Module, torch.Tensor]:
    torch.compiler.reset()
    with torch.device("meta"):
        return Gated(layers), torch.empty(2, TOKENS, WIDTH)


def search(layers: int, world: int, **given: Any) -> MeshSearch:
    model, x = made(layers)
    return search_meshes(model, (x,), world=world, hardware=H100, **given)


def rate_of(found: MeshSearch) -> float:
    """Batches that a rank does in a second, of the one mesh of a search."""
    (row,) = found.rows
    alike = math.prod(row.mesh.get(name, 1) for name in ("pp", "cp", "tp"))
    return row.microbatches / (row.timing.step * alike)


MESHES: list[Axes] = [
    {"dp_shard": 2, "tp": 2},
    {"dp_shard": 2, "cp": 2},
    {"cp": 2, "tp": 2},
    {"pp": 3, "dp_shard": 2},
]


def test_layers_price_a_mesh_as_the_whole_graph_does() -> None:
    """With all the memory that a rank needs, and with less."""

    def both(
        gm: fx.GraphModule, example_inputs: Any, inputs: list[compat.GraphInput]
    ) -> list[tuple[Screened | None, MeshSearch]]:
        captured = capture(gm, example_inputs, lowered_dtypes(inputs))
        short = shallow(captured, inputs)
        assert short is not None and short.count == 12
        assert len(short.graph.graph.nodes) < 0.5 * len(captured.graph.nodes)
        found = []
        for mesh in MESHES:
            whole = search_captured(captured, inputs, [mesh], H100, Config())
            for part in (1.0, 0.7):
                limit = int(part * whole.rows[0].memory.total)
                if part < 1:
                    config = Config(memory_budget=limit)
                    whole = search_captured(captured, inputs, [mesh], H100, config)
                asked = Asked(Config(), Training(), limit, None, 1)
                axes = planned_axes(mesh, asked.config)
                prices = prices_of(short.graph, short.inputs, axes, H100, asked)
                found.append((Layers(prices, short).screened(mesh), whole))
        return found

    model, x = made(12)
    for one, whole in intercept(model, (x,), None, both):
        assert one is not None and one.fits == whole.rows[0].fits
        assert one.rate == pytest.approx(rate_of(whole), rel=0.1), one


def test_a_deep_search_is_no_worse_than_any_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    few = search(12, 4)
    monkeypatch.setattr(equal_layers, "FEWEST", 1000)
    every = search(12, 4)
    assert few.best and every.best and len(few.rows) < len(every.rows)
    assert few.best.mfu >= 0.99 * every.best.mfu and few.reason()
    for mesh in ({"cp": 2, "tp": 2}, {"pp": 2, "cp": 2}, {"pp": 2, "tp": 2}):
        row = next(one for one in every.rows if mesh.items() <= one.mesh.items())
        if (pipeline := row.pipeline) is not None:  # beside 1f1b, which a mesh that is named has
            (named,) = search(12, 4, mesh=row.mesh).rows
            assert pipeline.order[0] == "interleaved" and row.timing.step < named.timing.step
