"""What is planned, built and predicted is what it was, or a change says which lines moved."""

from __future__ import annotations

import pytest

from replay import GOLDEN, lines, made_with, moved
from replay_rows import Row, every, quick

MODELS = list(dict.fromkeys(row.split()[0] for row in quick()))


@pytest.mark.parametrize("model", MODELS)
def test_programs_are_those_of_before(model: str) -> None:
    """Where a line moved for a reason, that goes into the commit, with the lines that
    `python tests/replay/replay.py > tests/golden/replay.txt` writes."""
    before = GOLDEN.read_text().splitlines()
    if made_with() != before[0]:
        pytest.skip(f"the lines are of {before[0].removeprefix('# ')}")
    rows = [row for row in quick() if row.split()[0] == model]
    known = [line for line in before[1:] if line.split()[0] in ("#", model)]
    assert not moved(known, lines(rows))


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
    found, held = every(), GOLDEN.read_text().splitlines()[2:]
    assert set(quick()) <= set(found) and len(found) == len(set(found)) >= 400
    assert MODELS == list(dict.fromkeys(line.split()[0] for line in held))
    row = Row.of("decoder dp_shard=2 zero=2 microbatch=accumulate precision={'reduce':'bfloat16'}")
    assert (row.model, row.mesh, row.microbatch) == ("decoder", {"dp_shard": 2}, "accumulate")
    assert row.options == {"zero": 2, "precision": {"reduce": "bfloat16"}}
