"""Faults planted in the files that a landing touched, and which of them the quick tests miss.

    python tests/planted.py --since main~5              # in the files that differ from there
    python tests/planted.py runtime/pipeline/*.py       # in those named

Faults are drawn (`--seed`) from `helpers/planting/changes.py`, planted one after another in copies
of the repository (`--jobs`), never in the tree itself, and the quick tests that concern the fault
run until one fails, or until several times what they take: with `--reach` those that reach its line
(`helpers/planting/reach.py` says how to make that folder); else those of its file's mirror folder
and those that import it, the nearest first. A line a fault goes into `--results`, from which
an interrupted run goes on. Ends with 1 under `LEAST` caught.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import queue
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "helpers"))

from import_graph import PACKAGES, imported_names, module_of  # noqa: E402
from planting.changes import Change, changes  # noqa: E402
from planting.reach import quickest, reaching  # noqa: E402

ROOT = Path(__file__).parents[1]
LEAST = 0.9
"""The share of planted faults that the quick tests are to catch."""


def touched(since: str) -> list[str]:
    """Files of the product that differ from a commit."""
    command = ["git", "-C", str(ROOT), "diff", "--name-only", "--diff-filter=d", since, "--"]
    told = subprocess.run([*command, *PACKAGES], check=True, capture_output=True, text=True)
    return [name for name in told.stdout.split() if name.endswith(".py")]


def drawn(files: Sequence[str], count: int, seed: int) -> list[tuple[str, Change]]:
    """Faults of the files, any as likely as another; the first of more are those of fewer."""
    every = [(name, one) for name in sorted(files) for one in changes((ROOT / name).read_text())]
    random.Random(seed).shuffle(every)
    return every[:count]


def nearest(name: str, most: int) -> list[str]:
    """Test files that concern a file of the product: that of its name, those of its mirror folder,
    or of one around that, which import it, others that import it, the rest of these folders, those
    that import its door."""
    path, module = Path(name), module_of(name)
    mirror = path.parent.relative_to("autoshard") if path.parts[0] == "autoshard" else path.parent
    ranked = []
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        names = {one for _, one in imported_names(ast.parse(file.read_text()))}
        near = file.parent.relative_to(ROOT / "tests") in (mirror, *mirror.parents[:-1])
        direct = any(one == module or one.startswith(f"{module}.") for one in names)
        door = any(one.startswith(f"{module.rpartition('.')[0]}.") for one in names)
        order = [file.stem == f"test_{path.stem}", near and direct, direct, near, door]
        if any(order):
            ranked.append((order.index(True), file.relative_to(ROOT).as_posix()))
    return [file for _, file in sorted(ranked)][:most]


class Copy:
    """A copy of the repository's files in `folder`, whose packages are those that are imported."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._clock = folder, time.time()
        told = subprocess.run(["git", "-C", str(ROOT), "ls-files"], capture_output=True, text=True)
        for name in told.stdout.splitlines():
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)
        for name in ("passes", "runtime"):  # which the package is installed with
            (folder / "autoshard" / name).symlink_to(folder / name)
        self._found: dict[str, bool] = {}

    def write(self, name: str, source: str) -> None:
        """A file, at a time of its own: compiled code is known by that."""
        (self.folder / name).write_text(source)
        self._clock += 10
        os.utime(self.folder / name, (self._clock, self._clock))

    def passes(self, tests: Sequence[str], seconds: float) -> bool:
        """Whether the quick tests of these names pass, and in time."""
        env = {**os.environ, "PYTHONPATH": str(self.folder)}
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
        process = subprocess.Popen(
            command,
            cwd=self.folder,
            env=env,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            return process.wait(seconds) in (0, 5)  # 5: all of them are slow
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()
            return False

    def sound(self, file: str, seconds: float) -> bool:
        """Whether a test file passes without a fault, in time."""
        if file not in self._found:
            self._found[file] = self.passes([file], seconds)
        return self._found[file]


def groups(
    copy: Copy, name: str, line: int, reach: Path | None, most: int, seconds: float
) -> Iterator[list[str]]:
    """The quick tests that concern a line, group after group: those that reach it, together; or,
    where none is known to, the nearest files."""
    near = nearest(name, len(name))
    found = quickest(reaching(reach, name, line), near, seconds) if reach else []
    if found:
        yield found
        return
    for file in near[:most]:
        if copy.sound(file, 60 + seconds * 4):
            yield [file]


def plant(
    copy: Copy, fault: tuple[str, Change], reach: Path | None, most: int, seconds: float
) -> dict[str, Any]:
    """What becomes of a fault: "caught", "missed" or "no test"."""
    name, change = fault
    source = (ROOT / name).read_text()
    said = "no test"
    for tests in groups(copy, name, change.line, reach, most, seconds):
        copy.write(name, change.of(source))
        said = "missed" if copy.passes(tests, 60 + seconds * 4) else "caught"
        copy.write(name, source)
        if said == "caught":
            break
    old = " ".join(source.encode()[change.start : change.end].decode().split())
    return {
        "at": f"{name}:{change.line}",
        "kind": change.kind,
        "old": old[:80],
        "new": change.new[:80],
        "said": said,
    }


def _line(one: dict[str, Any]) -> str:
    return f"{one['said']}: {one['at']}: {one['kind']}: {one['old']} -> {one['new']}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Plant, print, and say the share."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", help="of the product, as git names them")
    parser.add_argument("--since", default="main", help="a commit: the files that differ from it")
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--reach", type=Path, help="a folder: the lines that each test reaches")
    parser.add_argument("--jobs", type=int, default=1, help="faults planted at a time")
    parser.add_argument("--most", type=int, default=6, help="nearest test files a fault")
    parser.add_argument("--seconds", type=float, default=40.0, help="of the tests of one fault")
    parser.add_argument("--results", type=Path, default=ROOT / "build" / "planted.jsonl")
    args = parser.parse_args(arguments)
    faults = drawn(args.files or touched(args.since), args.faults, args.seed)
    args.results.parent.mkdir(parents=True, exist_ok=True)
    lines = args.results.read_text().splitlines() if args.results.exists() else []
    before = {(one["at"], one["kind"], one["new"]): one for one in map(json.loads, lines)}
    keys = [(f"{name}:{one.line}", one.kind, one.new[:80]) for name, one in faults]
    found = [before[key] for key in keys if key in before]
    left = [fault for key, fault in zip(keys, faults) if key not in before]
    with tempfile.TemporaryDirectory() as folder, args.results.open("a") as results:
        copies: queue.SimpleQueue[Copy] = queue.SimpleQueue()
        for job in range(args.jobs):
            copies.put(Copy(Path(folder) / str(job)))

        def one(fault: tuple[str, Change]) -> dict[str, Any]:
            copy = copies.get()
            try:
                return plant(copy, fault, args.reach, args.most, args.seconds)
            finally:
                copies.put(copy)

        with ThreadPoolExecutor(args.jobs) as pool:
            for said in pool.map(one, left):
                found.append(said)
                results.write(json.dumps(said) + "\n")
                results.flush()
                print(f"{len(found)} of {len(faults)}: {_line(said)}", flush=True)
    count = Counter(one["said"] for one in found)
    for one in found:
        if one["said"] != "caught":
            print(_line(one))
    share = count["caught"] / max(len(found), 1)
    print(f"{count['caught']} of {len(found)} caught, {share:.0%}, seed {args.seed}: {dict(count)}")
    return int(share < LEAST)


if __name__ == "__main__":
    sys.exit(main())
