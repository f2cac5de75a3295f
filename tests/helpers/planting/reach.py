"""Which lines of the product each test reaches: a pytest plugin writes it, `planted.py` reads it.

    REACH=build/reach python -m pytest -p planting.reach -n 2 --dist loadfile

Python 3.12 or newer writes: its `sys.monitoring` tells a line once a test and then is silent, at a
tenth of the suite's time. A line of JSON a test that passed goes into a file of each process in the
folder REACH: its name, its seconds, and for each file of the product the reached lines, as the bits
of a number. What a test's other processes reach is not among them.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
_FOLDERS = tuple(f"{ROOT / name}/" for name in ("autoshard", "passes", "runtime"))


def reaching(folder: Path, name: str, line: int) -> list[tuple[str, float]]:
    """Tests that reach a line of a file of the product, and their seconds."""
    return [
        (one["test"], one["seconds"])
        for one in _read(folder)
        if int(one["files"].get(name, "0"), 16) >> line & 1
    ]


@functools.cache
def _read(folder: Path) -> list[dict[str, Any]]:
    files = sorted(folder.glob("*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def quickest(
    tests: Sequence[tuple[str, float]], nearest: Sequence[str], seconds: float
) -> list[str]:
    """Of the tests, those that take so many seconds in all: of each file its quickest first, one
    after another, and the files in the order of `nearest`, then the quickest."""
    files: dict[str, list[tuple[float, str]]] = defaultdict(list)
    for test, taken in tests:
        files[test.partition("::")[0]].append((taken, test))
    order = {name: place for place, name in enumerate(nearest)}
    ranked = [
        (turn, order.get(name, len(order)), taken, test)
        for name, each in files.items()
        for turn, (taken, test) in enumerate(sorted(each))
    ]
    chosen, left = [], seconds
    for *_, taken, test in sorted(ranked):
        if taken <= left:
            chosen.append(test)
            left -= taken
    return chosen


class Reach:
    """Listens from the first test on; `taken()` is what was reached since the last call."""

    def __init__(self) -> None:
        self._lines: dict[str, int] = defaultdict(int)
        self._monitoring: Any = sys.monitoring  # type: ignore[attr-defined]
        self._tool = self._monitoring.PROFILER_ID
        self._monitoring.use_tool_id(self._tool, "reach")
        events = self._monitoring.events
        self._monitoring.register_callback(self._tool, events.PY_START, self._start)
        self._monitoring.register_callback(self._tool, events.LINE, self._line)
        self._monitoring.set_events(self._tool, events.PY_START)

    def _start(self, code: CodeType, offset: int) -> Any:
        del offset
        if code.co_filename.startswith(_FOLDERS):
            self._monitoring.set_local_events(self._tool, code, self._monitoring.events.LINE)
            self._line(code, code.co_firstlineno)
        return self._monitoring.DISABLE

    def _line(self, code: CodeType, line: int) -> Any:
        self._lines[code.co_filename] |= 1 << line
        return self._monitoring.DISABLE

    def taken(self) -> dict[str, str]:
        """Reached lines of each file, as the hexadecimal number whose bits they are."""
        found = {str(Path(name).relative_to(ROOT)): hex(bits) for name, bits in self._lines.items()}
        self._lines.clear()
        self._monitoring.restart_events()
        return found


_reach: Reach | None = None


def pytest_unconfigure() -> None:
    """What still runs while Python ends is nobody's."""
    if _reach is not None:
        sys.monitoring.set_events(sys.monitoring.PROFILER_ID, 0)  # type: ignore[attr-defined]


def pytest_runtest_setup() -> None:
    """What was reached between two tests is nobody's."""
    global _reach
    if _reach is None:
        _reach = Reach()
    _reach.taken()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """A line for each test that passed."""
    if report.when != "call" or _reach is None:
        return
    files = _reach.taken()
    if report.passed:
        line = {"test": report.nodeid, "seconds": round(report.duration, 3), "files": files}
        folder = Path(os.environ["REACH"])
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f"{os.getpid()}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
