"""Faults planted in the files that a landing touched, and which of them the quick tests miss.

    python tests/planted.py --since main~5              # in the files that differ from there
    python tests/planted.py runtime/pipeline/*.py       # in those named

Faults are drawn (`--seed`) from `helpers/planting/changes.py`, planted one after another in a copy
of the repository, never in the tree itself, and the quick tests that concern the file run until one
fails: those of its mirror folder and those that import it, the nearest first. A line a fault goes
into `--results`, from which an interrupted run goes on. Ends with 1 under `LEAST` caught.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "helpers"))

from import_graph import PACKAGES, imported_names, module_of  # noqa: E402
from planting.changes import Change, changes  # noqa: E402

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
    """Test files that concern a file of the product: that of its name, those of its mirror folder
    that import it, others that import it, the rest of its folder, those that import its door."""
    path, module = Path(name), module_of(name)
    mirror = path.parent.relative_to("autoshard") if path.parts[0] == "autoshard" else path.parent
    ranked = []
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        names = {one for _, one in imported_names(ast.parse(file.read_text()))}
        near = file.parent.relative_to(ROOT / "tests") == mirror
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
        self._found: dict[str, tuple[bool, float]] = {}

    def write(self, name: str, source: str) -> None:
        """A file, at a time of its own: compiled code is known by that."""
        (self.folder / name).write_text(source)
        self._clock += 10
        os.utime(self.folder / name, (self._clock, self._clock))

    def passes(self, files: Sequence[str], seconds: float) -> bool | None:
        """Whether the quick tests of the files pass; None: they have not ended in time."""
        env = {**os.environ, "PYTHONPATH": str(self.folder)}
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *files]
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
            return None

    def sound(self, file: str, seconds: float) -> bool:
        """Whether a test file passes without a fault, in time."""
        if file not in self._found:
            started = time.monotonic()
            self._found[file] = (self.passes([file], seconds) is True, time.monotonic() - started)
        return self._found[file][0]


def plant(
    copy: Copy, faults: Sequence[tuple[str, Change]], most: int, seconds: float
) -> Iterator[dict[str, Any]]:
    """What became of each fault: "caught", "missed", "not ended" in time, or "no test"."""
    for name, change in faults:
        source = (ROOT / name).read_text()
        tests = [file for file in nearest(name, most) if copy.sound(file, seconds)]
        copy.write(name, change.of(source))
        said = "missed" if tests else "no test"
        for file in tests:  # one after another: the nearest catches most
            passed = copy.passes([file], seconds)
            if not passed:
                said = "not ended" if passed is None else "caught"
                break
        copy.write(name, source)
        old = " ".join(source.encode()[change.start : change.end].decode().split())
        yield {
            "at": f"{name}:{change.line}",
            "kind": change.kind,
            "old": old[:80],
            "new": change.new[:80],
            "said": said,
        }


def main(arguments: Sequence[str] | None = None) -> int:
    """Plant, print, and say the share."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", help="of the product, as git names them")
    parser.add_argument("--since", default="main", help="a commit: the files that differ from it")
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--most", type=int, default=6, help="test files a fault")
    parser.add_argument("--seconds", type=float, default=120.0, help="of one test file")
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
        for one in plant(Copy(Path(folder)), left, args.most, args.seconds):
            found.append(one)
            results.write(json.dumps(one) + "\n")
            results.flush()
            print(f"{len(found)} of {len(faults)}: {one['said']}: {one['at']}: {one['kind']}: "
                  f"{one['old']} -> {one['new']}", flush=True)  # fmt: skip
    count = Counter(one["said"] for one in found)
    for one in found:
        if one["said"] != "caught":
            print(f"{one['said']}: {one['at']}: {one['kind']}: {one['old']} -> {one['new']}")
    share = count["caught"] / max(len(found), 1)
    print(f"{count['caught']} of {len(found)} caught, {share:.0%}, seed {args.seed}: {dict(count)}")
    return int(share < LEAST)


if __name__ == "__main__":
    sys.exit(main())
