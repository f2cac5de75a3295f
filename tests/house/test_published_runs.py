"""What docs/published_runs.md says of published runs is what the data and the estimate say."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

import published_runs
from autoshard.verification.comparison import furthest
from published_runs import BODY, HEADER, RUNS, Run, cells, machine_of, markdown, predicted, priced

PAGE = (Path(__file__).parents[2] / "docs" / "published_runs.md").read_text()
PUBLISHED = [HEADER.index(name) for name in HEADER if name not in ("predicted", "error")]


def rows() -> list[list[str]]:
    """The cells of the table in the docs."""
    start = PAGE.index(markdown([HEADER]))
    lines = PAGE[start:].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def said(row: list[str]) -> float:
    return float(row[HEADER.index("predicted")].replace(",", ""))


def test_the_table_is_of_the_published_runs() -> None:
    found = rows()
    assert len(found) == len(RUNS) >= 14
    for row, run in zip(found, RUNS, strict=True):
        memory = row[HEADER.index("GiB a GPU") + 1]
        want = cells(run, published_runs.Predicted(said(row), float(memory or 0)))
        assert [row[i] for i in PUBLISHED] == [want[i] for i in PUBLISHED]
        assert row == want, "an error is not that of its row"
    for key, source in BODY["sources"].items():
        assert source["url"] in PAGE and key in PAGE


def test_the_statement_is_that_of_the_table() -> None:
    memory = HEADER.index("GiB a GPU") + 1
    found = [
        (run, published_runs.Predicted(said(row), float(row[memory] or 0)))
        for row, run in zip(rows(), RUNS, strict=True)
    ]
    for line in published_runs.summary(found).splitlines():
        assert f"- {line}\n" in PAGE
    for role in ("fitted", "held out"):
        errors = published_runs.errors(found, role)
        assert len(errors) >= 15
        assert statistics.median(errors) <= 0.15 and furthest(errors) <= 0.30


@pytest.mark.parametrize("index", [1, 20])
def test_the_table_is_what_the_estimate_says(index: int) -> None:
    row, run = rows()[index], RUNS[index]
    assert predicted(run).tokens == pytest.approx(said(row), rel=0.01)


def test_two_depths_tell_of_any(monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"vocab": 512, "width": 256, "hidden": 1024, "heads": 4, "heads_kv": 2, "layers": 7}
    monkeypatch.setitem(BODY["models"], "small", small)
    run = Run(
        source="none",
        model="small",
        machine="h100",
        world=16,
        mesh={"dp_shard": 16},
        batch=2,
        length=512,
        checkpointing="full",
        tokens=1.0,
        role="held out",
    )
    machine = machine_of(run.machine)
    whole = priced(run, 7, machine)
    found = predicted(run, machine)
    assert found.tokens == pytest.approx(2 * 512 / whole.timing.step, rel=0.02)
    assert found.gibibytes == pytest.approx(whole.memory.total / 2**30, rel=0.02)
