"""The command that plants faults: what it plants, and that it tells which of them nobody sees."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from pathlib import Path

import pytest

import planted
from planting.changes import changes
from planting.reach import Reaching, quickest, reaching

SOURCE = '''"""A module with 2 < 3 in its text."""

def total(xs: list[int], most: int = 1 + 1) -> int:
    """Not a + b."""
    if not xs or len(xs) > most:
        raise ValueError(f"{len(xs) + 1} of them")
    copies.wait()
    first = min(xs[0], -most).clone()
    return reduce(first, "sum") if most is None else first * 2
'''


def test_faults_are_slips_of_code_and_leave_a_program() -> None:
    found = changes(SOURCE)
    assert {one.kind for one in found} == {
        *("comparison", "condition negated", "condition dropped", "not dropped", "sign dropped"),
        *("term dropped", "index shifted", "reduction", "statement left out", "call left out"),
        "early return",
    }
    for one in found:
        compile(one.of(SOURCE), "a file", "exec")
        assert one.of(SOURCE) != SOURCE and one.line not in (1, 4, 6), one
    assert not changes("def nothing() -> None:\n    return None\n")


def test_the_tests_that_reach_a_line_are_found_and_the_quickest_of_the_nearest_files_chosen(
    tmp_path: Path,
) -> None:
    rows = [("a::x", 3.0, 0b100), ("a::y", 1.0, 0b110), ("b::z", 2.0, 0b100), ("b::w", 9.0, 0b100)]
    lines = [
        json.dumps({"test": test, "seconds": taken, "files": {"runtime/sums.py": hex(bits)}})
        for test, taken, bits in rows
    ]
    (tmp_path / "1.jsonl").write_text("\n".join(lines[:2]))
    (tmp_path / "2.jsonl").write_text("\n".join(lines[2:]))
    assert [one[:2] for one in reaching(tmp_path, "runtime/sums.py", 1)] == [("a::y", 1.0)]
    assert reaching(tmp_path, "runtime/other.py", 1) == []
    found = reaching(tmp_path, "runtime/sums.py", 2)
    assert quickest(found, ["b", "a"], 32.0) == ["a::y", "b::z", "a::x", "b::w"]
    assert quickest(found, [], 4.5) == ["a::y", "b::z"]
    wide = [*found, Reaching("c::v", 5.0, 0b11100)]
    assert quickest(wide, [], 12.5) == ["a::y", "c::v", "b::z", "a::x"], "what is reached besides"


def test_those_that_no_test_sees_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a small repository, whose test sees one of two terms; a second run has all results."""
    files = {
        "autoshard/__init__.py": "",
        "passes/__init__.py": "",
        "runtime/__init__.py": "",
        "runtime/sums.py": "def total(a, b):\n    return a + b\n",
        "tests/runtime/test_sums.py": "from autoshard.runtime.sums import total\n\n"
        "def test_total():\n    assert total(1, 0) == 1\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    for command in (["init", "-q"], ["add", "."]):
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True)
    monkeypatch.setattr(planted, "ROOT", tmp_path)
    arguments = ["runtime/sums.py", "--results", str(tmp_path / "results")]
    assert planted.main(arguments) == 1
    told = capsys.readouterr().out
    assert "missed: runtime/sums.py:2: term dropped: a + b -> (a)" in told
    assert "2 of 3 caught, 67%" in told
    lines = (tmp_path / "results").read_text().splitlines()
    assert Counter(json.loads(line)["said"] for line in lines) == {"caught": 2, "missed": 1}
    assert planted.main(arguments) == 1 and "2 of 3 caught" in capsys.readouterr().out
    assert (tmp_path / "runtime/sums.py").read_text() == files["runtime/sums.py"]
