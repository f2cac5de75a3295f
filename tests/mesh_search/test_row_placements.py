"""Rows that are short of memory have the plan that the backend would choose, never a slower one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import autoshard
from autoshard.building import one_rank
from autoshard.cli.arguments import options_and_entries
from autoshard.mesh_search import search
from autoshard.mesh_search.placements import within_memory
from autoshard.mesh_search.prices import MeshPrice
from models_hf import meta_llama

TP = {"tp": 8}


def llama() -> dict[str, Any]:
    """Two layers of 8B shape, and a batch."""
    torch.compiler.reset()
    sizes = {"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8}
    model, batch = meta_llama(1, 8192, **sizes, **heads)
    return {"model": model.to(torch.bfloat16), "kwargs": batch}


def priced(mesh: dict[str, int], budget: int) -> tuple[MeshPrice, MeshPrice]:
    """The row of a mesh with placements planned first, and the row that is shown."""
    first: list[MeshPrice] = []

    def kept(tried: Any, *rest: Any) -> Any:
        first.extend(row for row, _ in tried)
        return within_memory(tried, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "within_memory", kept)
        found = search.search_meshes(
            **llama(), world=8, mesh=mesh, hardware="h100", memory={"budget": budget}
        )
    return first[0], found.rows[0]


@pytest.fixture(scope="module")
def whole() -> MeshPrice:
    """The row of tp=8 with all the memory that it takes."""
    return priced(TP, 10**12)[1]


def part(row: MeshPrice, share: float) -> int:
    """A budget: all but so much of a row's activations."""
    return int(row.memory.total - (1 - share) * row.memory.activations)


def test_a_row_has_the_plan_that_the_backend_chooses(
    whole: MeshPrice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = part(whole, 0.4)
    before, row = priced(TP, budget)
    assert not before.fits and row.fits, "a plan that needs less"
    assert row.plan.graphs != before.plan.graphs and row.memory.total <= budget
    row.plan.save(tmp_path / "plan.json")
    given: dict[str, Any] = {"mesh": TP, "hardware": "h100"}
    followed = autoshard.trace(**llama(), plan=tmp_path / "plan.json", **given)
    assert followed.plan.graphs == row.plan.graphs
    assert followed.plan.parameters == row.plan.parameters
    # what is left of the backend's way is to count
    monkeypatch.setattr(one_rank, "fit", lambda _, planned, *__: planned)
    own = autoshard.trace(**llama(), memory={"budget": budget}, **given)
    assert own.plan.graphs == row.plan.graphs
    mine, its = own.decisions.recomputation, row.recomputation
    assert mine is not None and its is not None
    assert (mine.again, mine.kept, mine.seconds) == (its.again, its.kept, its.seconds)


@pytest.mark.parametrize(
    ("mesh", "share"),
    [(TP, 0.7), (TP, 0.1), ({"cp": 8}, 0.6), ({"cp": 2, "tp": 4}, 0.6)],
)
def test_no_row_is_slower_than_with_placements_first(
    whole: MeshPrice, mesh: dict[str, int], share: float
) -> None:
    before, row = priced(mesh, part(whole, share))
    if before.fits:
        assert row.fits and row.timing.step <= before.timing.step
    else:
        assert row.fits or row == before
    if mesh == TP:
        assert before.fits == row.fits == (share == 0.7)


def test_rows_that_cannot_be_recommended_are_left() -> None:
    def row(name: str, mfu: float, fits: bool) -> Any:
        return SimpleNamespace(mesh={name: 2}, mfu=mfu, fits=fits, refused="")

    def plans(most: float, after: Any, gains: bool = True) -> Any:
        return SimpleNamespace(
            most=lambda *_: most, may_gain=lambda *_: gains, better=lambda *_: after
        )

    better = row("tp", 0.45, True)
    rows = [
        (row("dp_shard", 0.4, True), plans(0.4, None, gains=False)),
        (row("cp", 0.30, True), plans(0.44, None)),  # could do more than dp_shard, less than tp
        (row("tp", 0.35, True), plans(0.5, better)),
        (row("ep", 0.1, False), plans(0.2, row("ep", 0.1, True))),
    ]
    said: list[str] = []
    found = within_memory(rows, [row("pp", 0.2, True)], said.append)
    assert said == ["fitting tp=2", "fitting ep=2"]
    assert [(each.mfu, each.fits) for each in found[:4]] == [
        *((0.4, True), (0.30, True), (0.45, True), (0.1, True)),
    ]
    assert found[2] is better and found[4].mesh == {"pp": 2}


def test_every_option_reaches_the_prices(monkeypatch: pytest.MonkeyPatch) -> None:
    options, entries = options_and_entries(
        "LlamaConfig", [("memory.chunk_loss", "auto"), ("zero", 2)]
    )
    assert not entries
    given: list[Any] = []
    prices = search.MeshPrices

    def noted(planned: Any, n: int, machine: Any, asked: Any, *rest: Any) -> Any:
        given.append(asked.config)
        return prices(planned, n, machine, asked, *rest)

    monkeypatch.setattr(search, "MeshPrices", noted)
    torch.compiler.reset()
    with torch.device("meta"):
        model, x = torch.nn.Linear(8, 8), torch.zeros(4, 8)
    search.search_meshes(model, (x,), world=1, hardware="h100", **options)
    assert [(one.chunk_loss, one.zero) for one in given] == [("auto", 2)]
