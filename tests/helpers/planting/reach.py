"""Which lines of the product each test reaches: a pytest plugin writes it, `planted.py` reads it.

    REACH=build/reach python -m pytest -p planting.reach -n 2 --dist loadfile

Python 3.12 or newer writes: its `sys.monitoring` tells a line once a test and then is silent, at a
tenth of the suite's time. A line of JSON a test that passed goes into a file of each process in the
folder REACH: its name, its seconds, and for each file of the product the reached lines, as the bits
of a number. What the ranks of a pool reach is among them; what a test starts itself is not.
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
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[3]
_FOLDERS = tuple(f"{ROOT / name}/" for name in ("autoshard", "passes", "runtime"))
_STARTS = 0.1
"""Seconds that any test takes beside its own."""


class Reaching(NamedTuple):
    """A test that reaches a line; lines: those of the file that it reaches, as bits."""

    test: str
    seconds: float
    lines: int


def reaching(folder: Path, name: str, line: int) -> list[Reaching]:
    """Tests that reach a line of a file of the product."""
    each = ((one, int(one["files"].get(name, "0"), 16)) for one in _read(folder))
    return [Reaching(one["test"], one["seconds"], bits) for one, bits in each if bits >> line & 1]


@functools.cache
def _read(folder: Path) -> list[dict[str, Any]]:
    files = sorted(folder.glob("*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def quickest(tests: Sequence[Reaching], nearest: Sequence[str], seconds: float) -> list[str]:
    """Of the tests, those that take so many seconds in all. For half of them, those that together
    reach most of the file, as what all tests reach few look at. Then of each file its quickest, of
    the second of `nearest` half as many as of the first, and so on."""
    chosen = dict[str, None]()
    reached, left, some = 0, seconds, list(tests)

    def worth(one: Reaching) -> float:
        return (one.lines & ~reached).bit_count() / (one.seconds + _STARTS)

    while some := [one for one in some if one.seconds <= left - seconds / 2 and worth(one)]:
        best = max(some, key=worth)
        chosen[best.test] = None
        reached, left = reached | best.lines, left - best.seconds
    files: dict[str, list[tuple[float, str]]] = defaultdict(list)
    for test, taken, _ in tests:
        if test not in chosen:
            files[test.partition("::")[0]].append((taken, test))
    order = {name: place for place, name in enumerate(nearest)}
    ranked = [
        ((turn + 1) * (order.get(name, len(order)) + 1), taken, test)
        for name, each in files.items()
        for turn, (taken, test) in enumerate(sorted(each))
    ]
    for *_, taken, test in sorted(ranked):
        if taken <= left:
            chosen[test] = None
            left -= taken
    return list(chosen)


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


_OWNER = "REACH_OWNER"
"""In the environment of a pool's ranks: the process of the test."""


class RankReach:
    """Listens in a rank of a pool, and leaves what a call reached to the process of the test."""

    def __init__(self) -> None:
        self._reach = Reach()
        self._file = Path(os.environ["REACH"]) / f"{os.environ[_OWNER]}-{os.getpid()}.rank"

    def leave(self) -> None:
        """Write what was reached since the last call."""
        with self._file.open("a") as file:
            file.write(json.dumps(self._reach.taken()) + "\n")


def _of_ranks(folder: Path) -> dict[str, int]:
    """What the ranks left since the last call."""
    found: dict[str, int] = defaultdict(int)
    for file in folder.glob(f"{os.getpid()}-*.rank"):
        for line in file.read_text().splitlines():
            for name, bits in json.loads(line).items():
                found[name] |= int(bits, 16)
        file.unlink()
    return found


def _folder() -> Path:
    folder = Path(os.environ["REACH"])
    folder.mkdir(parents=True, exist_ok=True)
    return folder


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
        os.environ[_OWNER] = str(os.getpid())
    _of_ranks(_folder())
    _reach.taken()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """A line for each test that passed."""
    if report.when != "call" or _reach is None:
        return
    files, folder = _reach.taken(), _folder()
    for name, bits in _of_ranks(folder).items():
        files[name] = hex(bits | int(files.get(name, "0"), 16))
    if report.passed:
        line = {"test": report.nodeid, "seconds": round(report.duration, 3), "files": files}
        with (folder / f"{os.getpid()}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
