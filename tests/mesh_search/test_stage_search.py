"""Meshes with an axis pp among those that are tried: their stages, memory, waiting and refusals."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import autoshard
from autoshard.building.pipeline.traced import TracedPipeline
from autoshard.errors import PlanError
from autoshard.mesh_search import MeshSearch, search_meshes
from autoshard.mesh_search.factorisations import refusal
from autoshard.planning.estimate import Training

HIDDEN, ROWS, LAYERS = 256, 512, 6


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor, loss: bool = True) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.square().mean() if loss else x


class Gated(nn.Module):
    """Layers that keep much more than what travels between them."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(HIDDEN, 2 * HIDDEN) for _ in range(3))
        self.down = nn.ModuleList(nn.Linear(2 * HIDDEN, HIDDEN) for _ in range(3))

    def forward(self, x: torch.Tensor, loss: bool = True) -> torch.Tensor:
        for up, down in zip(self.up, self.down):
            wide = up(x)
            x = x + down(torch.sigmoid(wide) * torch.tanh(wide))
        return x.square().mean()


def search(
    world: int, batches: int = 1, loss: bool = True, made: Any = Layers, **options: Any
) -> MeshSearch:
    torch.compiler.reset()
    with torch.device("meta"):
        model, x = made(), torch.empty(ROWS, HIDDEN)
    return search_meshes(
        model,
        (x, loss),
        world=world,
        hardware="h100",
        training=Training(microbatches=batches),
        **options,
    )


def test_stages_share_the_model_and_wait_as_the_formula_says() -> None:
    (row,) = search(3, 4, mesh={"pp": 3}).rows
    assert row.pipeline is not None and row.fits and not row.refused
    assert row.microbatches == row.pipeline.microbatches == 12
    parameters = LAYERS * (HIDDEN + 1) * HIDDEN * 4
    held = [stage.parameters for stage in row.pipeline.memory]
    assert held == [parameters // 3] * 3  # equal layers are cut equally
    assert row.pipeline.sent_bytes == (ROWS * HIDDEN * 4,) * 2
    assert 2 / 14 < row.pipeline.idle < 0.25  # the middle stage has more transfers
    # the first keeps three micro-batches, the last one
    first, _, last = (stage.activations for stage in row.pipeline.memory)
    assert last < first <= 3 * last
    assert row.memory == max(row.pipeline.memory, key=lambda stage: stage.total)
    ends = [sum(times) for times in row.pipeline.seconds]
    assert row.timing.step >= 11 * max(ends) + sum(ends)
    both = 2 * 12 * ROWS * HIDDEN * 4  # the middle one sends activations on, and gradients back
    assert row.timing.traffic["pp"].nbytes == both


def test_pp_is_tried_between_nodes_beside_what_runs_with_it() -> None:
    found = search(32)
    rows = [row for row in found.rows if "pp" in row.mesh]
    beside = [tuple(row.mesh.get(name, 1) for name in ("pp", "cp", "tp")) for row in rows]
    inner = [*((1, tp) for tp in (1, 2, 4, 8)), *((cp, 1) for cp in (2, 4, 8))]
    inner += [(2, 2), (2, 4), (4, 2), (2, 8), (4, 8), (8, 8)]
    tried = {(pp, *one) for pp in (2, 4) for one in inner if pp * math.prod(one) <= 32}
    assert sorted(beside) == sorted(tried)  # once each, the best way to divide the rest
    assert found.best is not None and not refusal(found.best.mesh)
    for row in rows:
        assert row.refused == refusal(row.mesh)
        assert row.timing.step > row.timing.compute + row.timing.exposed


def test_stages_that_do_not_fit_compute_again_each_as_much_as_it_must() -> None:
    """As the program does, whose stages are counted; early stages keep more micro-batches."""
    asked: dict[str, Any] = {"mesh": {"pp": 3}, "made": Gated}
    (free,) = search(3, 4, **asked).rows
    assert free.pipeline is not None and free.recomputation is None
    budget = int(0.7 * free.memory.total)
    (row,) = search(3, 4, memory={"budget": budget}, **asked).rows
    again, one = row.recomputation, row.pipeline
    assert row.fits and one is not None and again is not None and again.spared > 0
    slower = [a[1] - b[1] for a, b in zip(one.seconds, free.pipeline.seconds)]
    assert slower[0] > 0 == slower[2] and again.seconds == pytest.approx(12 * slower[0])
    assert row.timing.step > free.timing.step
    torch.compiler.reset()
    with torch.device("meta"):
        model, x = Gated(), torch.empty(12 * ROWS, HIDDEN)
    options: dict[str, Any] = {
        "mesh": {"pp": 3},
        "pipeline": {"microbatches": 12},
        "inner": "aot_eager",
    }
    options["memory"] = budget + x.nbytes  # the batch is counted beside stages
    traced = autoshard.trace(model, (x,), hardware="h100", **options)
    assert isinstance(traced, TracedPipeline) and 0 in traced.program.recomputed
    first = traced.memory()[0]
    counted = first.peak - first.shared + 2 * first.parameters
    assert budget >= one.memory[0].total == pytest.approx(counted, rel=0.15)
    (small,) = search(3, 4, memory={"budget": budget // 2}, **asked).rows
    assert not small.fits and "with all recomputed that can be" in small.unfit
    (eager,) = search(3, 4, memory={"budget": budget}, inner="eager", **asked).rows
    assert not eager.fits and eager.recomputation is None


def test_what_no_pipeline_runs_is_not_tried() -> None:
    assert all("pp" not in row.mesh for row in search(16, loss=False).rows)
    assert all("pp" not in row.mesh for row in search(8).rows)  # one node


def test_more_stages_than_places_are_refused() -> None:
    with pytest.raises(PlanError, match="cannot be cut into 64 stages, for pp=64"):
        search(64, mesh={"pp": 64})


def test_interleaved_stages_wait_less_and_send_more() -> None:
    (plain,) = search(2, 4, mesh={"pp": 2}).rows
    (row,) = search(
        2, 4, mesh={"pp": 2}, pipeline={"schedule": "interleaved", "virtual_stages": 3}
    ).rows
    one, other = row.pipeline, plain.pipeline
    assert one is not None and other is not None
    assert len(one.seconds) == 6 and len(one.memory) == 2 and one.idle < other.idle
    held, before = ([each.parameters for each in found.memory] for found in (one, other))
    assert held == before
    # three stages a rank: one transfer of the first or the last, two of the others
    assert row.timing.traffic["pp"].nbytes == 5 * plain.timing.traffic["pp"].nbytes
