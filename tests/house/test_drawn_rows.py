"""Rows that CI leaves out are drawn, by the commit: each is seen within a few landings."""

from __future__ import annotations

from pathlib import Path

import pytest

from exhaustive import (
    EVERY,
    LISTED,
    OTHERS,
    QUICK,
    SHARE,
    SHARE_OF_QUICK,
    SHARE_OF_SLOW,
    drawn,
    rests,
    seed,
    share_of,
)

TESTS = Path(__file__).parents[1]
ROWS = [f"{LISTED}[{i}]" for i in range(9)] + [f"tests/other.py::test_it[{i}]" for i in range(99)]


def test_a_share_of_the_rows_is_drawn_by_the_seed() -> None:
    found = drawn(ROWS, "0123abc")
    assert found == drawn(ROWS[::-1], "0123abc") != drawn(ROWS, "0123abd")
    assert sum(row.startswith(LISTED) for row in found) == 9 // SHARE
    assert len(found) == 9 // SHARE + OTHERS and not drawn(ROWS, "")
    landings = [drawn(ROWS, f"{i:012x}") for i in range(12)]
    assert set().union(*landings) >= set(ROWS[:9])


def test_each_slow_test_is_run_within_a_few_landings() -> None:
    tests = ROWS[9:]
    landings = [[one for one in tests if not rests(one, f"{i:012x}")] for i in range(90)]
    assert {share_of(one) for one in tests} == {SHARE_OF_SLOW}
    assert all(abs(len(run) / len(tests) - SHARE_OF_SLOW) < 0.2 for run in landings)
    assert set().union(*landings) == set(tests) and landings[0] != landings[1]
    assert not any(rests(one, by) for one in tests for by in ("", EVERY))


def test_quick_tests_of_many_like_rows_are_drawn_as_well() -> None:
    for file, tests in QUICK.items():
        source = (TESTS / file).read_text()
        for test in tests:
            assert f"def {test}(" in source, (file, test)
            rows = [f"tests/{file}::{test}[{i}]" for i in range(20)]
            run = [sum(not rests(row, f"{i:012x}", slow=False) for row in rows) for i in range(40)]
            assert abs(sum(run) / 800 - SHARE_OF_QUICK) < 0.1
    assert not any(rests(row, "0123abc", slow=False) for row in ROWS)


def test_the_seed_can_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOSHARD_ROWS", "0123abc")
    assert seed() == "0123abc"
