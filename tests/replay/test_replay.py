"""What is planned, built and predicted is what it was, or a change says which lines moved."""

from __future__ import annotations

import pytest

from replay import GOLDEN, lines, made_with, moved
from replay_rows import Row, every, quick


def test_programs_are_those_of_before() -> None:
    """Where a line moved for a reason, that goes into the commit, with the lines that
    `python tests/replay/replay.py > tests/golden/replay.txt` writes."""
    before = GOLDEN.read_text().splitlines()
    if made_with() != before[0]:
        pytest.skip(f"the lines are of {before[0].removeprefix('# ')}")
    assert not moved(before, lines(quick()))


def test_a_line_that_moved_names_its_columns() -> None:
    header = "# row plan local"
    before = [header, "a tp=2 11 22", "b tp=2 33 44", "c tp=2 55 66"]
    after = [header, "a tp=2 11 22", "b tp=2 33 45", "d cp=2 77 88"]
    assert moved(before, before) == []
    assert moved(before, after) == [
        "gone: c tp=2",
        "moved: b tp=2: local 44 -> 45",
        "new: d cp=2",
    ]


def test_rows_are_read_and_each_is_there_once() -> None:
    found = every()
    assert set(quick()) <= set(found) and len(found) == len(set(found)) >= 400
    row = Row.of("decoder dp_shard=2 zero=2 microbatch=accumulate precision={'reduce':'bfloat16'}")
    assert (row.model, row.mesh, row.microbatch) == ("decoder", {"dp_shard": 2}, "accumulate")
    assert row.options == {"zero": 2, "precision": {"reduce": "bfloat16"}}
