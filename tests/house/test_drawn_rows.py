"""Rows that CI leaves out are drawn, by the commit: each is seen within a few landings."""

from __future__ import annotations

import pytest

from exhaustive import LISTED, OTHERS, SHARE, drawn, seed

ROWS = [f"{LISTED}[{i}]" for i in range(9)] + [f"tests/other.py::test_it[{i}]" for i in range(99)]


def test_a_share_of_the_rows_is_drawn_by_the_seed() -> None:
    found = drawn(ROWS, "0123abc")
    assert found == drawn(ROWS[::-1], "0123abc") != drawn(ROWS, "0123abd")
    assert sum(row.startswith(LISTED) for row in found) == 9 // SHARE
    assert len(found) == 9 // SHARE + OTHERS and not drawn(ROWS, "")
    landings = [drawn(ROWS, f"{i:012x}") for i in range(12)]
    assert set().union(*landings) >= set(ROWS[:9])


def test_the_seed_can_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOSHARD_ROWS", "0123abc")
    assert seed() == "0123abc"
