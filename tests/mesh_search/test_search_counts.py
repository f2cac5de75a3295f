"""What a search costs, in counts: plans by the sizes of tp and cp, frontiers by plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autoshard.errors import ConfigError
from autoshard.mesh_search import search
from autoshard.planning.estimate import Training, recomputation
from autoshard.planning.search import one_axis


class Layers(nn.Module):
    """Equal layers, each wide inside."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(count)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def counts(
    monkeypatch: pytest.MonkeyPatch,
    layers: int,
    world: int,
    mesh: dict[str, int] | None = None,
    budget: int = 200_000,
) -> tuple[int, int, int, int]:
    """Rows of a search that keeps little and may use the host, and how often it planned a graph,
    solved placements at dearer bytes, and solved a cut."""
    made: dict[str, int] = {}

    def counted(owner: Any, name: str) -> None:
        function = getattr(owner, name)

        def run(*args: Any, **kwargs: Any) -> Any:
            made[name] = made.get(name, 0) + 1
            return function(*args, **kwargs)

        monkeypatch.setattr(owner, name, run)

    with monkeypatch.context() as monkeypatch, torch.device("meta"):
        counted(search, "ask")
        counted(one_axis, "of_a_byte")
        counted(recomputation, "minimum_cut")
        found = search.search_meshes(
            Layers(layers),
            (torch.zeros(64, 64),),
            world=world,
            mesh=mesh,
            hardware="h100",
            memory={"budget": budget, "host": 1 << 30},
        )
    torch.compiler.reset()
    return len(found.rows), made["ask"], made.get("of_a_byte", 0), made["minimum_cut"]


def test_a_search_plans_by_the_size_of_an_axis_and_cuts_by_the_layer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows, plans, solved, _ = counts(monkeypatch, 1, 4)
    assert (rows, plans) == (10, 6), "tp and cp of 2 and 4, neither, and both"
    assert 0 < solved <= 3 * 5, "three dearer bytes for each size of tp and cp"
    for layers in (2, 4):
        budget = 325_000 * layers  # states on two ranks, and most of the activations
        assert 0 < counts(monkeypatch, layers, 2, {"tp": 2}, budget)[2] <= 3, "whatever the depth"
    cuts = [counts(monkeypatch, layers, 2, {"tp": 2})[3] for layers in (4, 8, 16)]
    assert cuts[2] - cuts[1] <= cuts[1] - cuts[0], f"equal layers are cut once: {cuts}"


def test_a_global_batch_goes_in_the_micro_batches_that_are_best(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of one trace, priced as where such batches are given."""

    def rows(samples: int, mesh: dict[str, int] | None, **given: Any) -> Any:
        torch.compiler.reset()
        with torch.device("meta"):
            model, x = Layers(2), torch.zeros(samples, 64)
        return search.search_meshes(model, (x,), world=4, mesh=mesh, hardware="h100", **given).rows

    planned: list[int] = []
    prices_of = search.prices_of

    def counted(*args: Any, **kwargs: Any) -> Any:
        planned.append(args[4].batch)
        return prices_of(*args, **kwargs)

    monkeypatch.setattr(search, "prices_of", counted)
    found = rows(1, None, global_batch=48)
    assert all(row.batch and 48 % row.batch == 0 for row in found)
    assert planned.count(1) == 6 and max(planned) <= 16 and len(planned) <= 6 * 5
    with pytest.raises(ConfigError, match="no whole number of samples"):
        rows(1, {"dp_shard": 4}, global_batch=6)
    (staged,) = rows(1, {"pp": 2, "dp_shard": 2}, global_batch=64)
    assert staged.batch and 2 * staged.batch * staged.microbatches == 64
    (row,) = rows(1, {"dp_shard": 4}, global_batch=64)
    (same,) = rows(row.batch, row.mesh, training=Training(microbatches=row.microbatches))
    assert row.timing == same.timing and row.memory == same.memory and row.mfu == same.mfu


def test_other_options_of_memory_plan_nothing_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing fits as it was asked; and find what is found with them at once."""
    asked: list[int] = []
    solved: list[int] = []

    def counted(owner: Any, name: str, calls: list[int]) -> None:
        function = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a, **k: calls.append(1) or function(*a, **k))

    counted(search, "_planned", asked)
    counted(one_axis, "of_a_byte", solved)

    def found(memory: dict[str, int], *others: dict[str, int]) -> Any:
        torch.compiler.reset()
        with torch.device("meta"):
            model, x = Layers(8), torch.zeros(2048, 64)
        more = [{"memory": other} for other in others]
        given = {"world": 4, "hardware": "h100", "otherwise": lambda first: more}
        return search.search_meshes(model, (x,), memory=memory, **given)

    less, more = {"budget": 3_000_000}, {"budget": 3_000_000, "host": 1 << 30}
    assert found(less).best is None
    plans, dearer = len(asked), len(solved)
    alone = found(more)
    asked.clear()
    solved.clear()
    both = found(less, more)
    assert (len(asked), len(solved)) == (plans, dearer) and plans and dearer
    assert both.options == {"memory": more} and both.best is not None
    assert both.rows == alone.rows
