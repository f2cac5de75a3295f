"""Replay: one line of digests for each of many (model, mesh, options), in one process.

    python tests/replay/replay.py                     # some 60 rows, those of `make test`
    python tests/replay/replay.py --all > before.txt  # some 400, before a release
    python tests/replay/replay.py --all --against before.txt
    python tests/replay/replay.py --detail "llama tp=2" --since main

A line holds digests of the plan file, the rank's local graph, the forward and backward graphs after
all passes and the ledger of collectives, the bytes at the peak and between steps, the planner's
charge and the predicted seconds of a step. A change that is to change nothing has the same lines
before and after; one that does says which moved and why. --against: exits 1 where a line differs,
and says which columns. --detail: the texts behind the digests of one row; with --since, how they
differ from those of another commit.
"""

from __future__ import annotations

import argparse
import difflib
import gc
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("tests/replay", "tests/helpers", "tests/helpers/ranks", "tests/helpers/export")
sys.path[:0] = [str(ROOT / folder) for folder in FOLDERS]

GOLDEN = ROOT / "tests/golden/replay.txt"


def lines(texts: Sequence[str]) -> list[str]:
    """Whose graphs they are, a header, and the line of each row."""
    from replay_columns import COLUMNS, replay
    from replay_rows import Row

    width = max(map(len, texts))
    found = [made_with(), " ".join((f"# {'row':{width - 2}}", *COLUMNS))]
    for text, made in zip(texts, replay([Row.of(text) for text in texts])):
        found.append(" ".join((f"{text:{width}}", *made.cells().values())))
    return found


def made_with() -> str:
    """What the lines are of: libraries, whose graphs they are, and Python, whose sums of numbers
    round otherwise since 3.12, so that ties between plans fall otherwise."""
    import torch
    import transformers

    versions = (
        f"torch {torch.__version__.partition('+')[0]}, transformers {transformers.__version__}"
    )
    return f"# {versions}, Python {sys.version_info.major}.{sys.version_info.minor}"


def moved(before: Sequence[str], after: Sequence[str]) -> list[str]:
    """What is another in `after`: a line for each row that came, went or moved."""
    names = next((line.split()[2:] for line in after if line.startswith("# row")), [])
    old, new = _by_row(before, len(names)), _by_row(after, len(names))
    found = [f"gone: {row}" for row in old if row not in new]
    for row, cells in new.items():
        if row not in old:
            found.append(f"new: {row}")
        elif old[row] != cells:
            columns = [
                f"{name} {was} -> {now}"
                for name, was, now in zip(names, old[row], cells)
                if was != now
            ]
            found.append(f"moved: {row}: {', '.join(columns)}")
    return found


def _by_row(found: Sequence[str], columns: int) -> dict[str, list[str]]:
    words = [line.split() for line in found if line.strip() and not line.startswith("#")]
    return {" ".join(each[:-columns]): each[-columns:] for each in words}


def detail(row: str) -> str:
    """The texts behind the digests of a row."""
    from replay_columns import replay
    from replay_rows import Row

    (made,) = replay([Row.of(row)])
    parts = [f"== {name}\n{text}" for name, text in made.texts.items()]
    parts += [f"== {name}\n{value}" for name, value in made.figures.items()]
    return "\n".join([*parts, *([f"== error\n{made.error}"] if made.error else [])]) + "\n"


def detail_at(row: str, commit: str) -> str:
    """`detail` of a row, as another commit makes it."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder, "tree")
        tree.mkdir()
        archive = subprocess.run(
            ["git", "archive", commit], cwd=ROOT, check=True, capture_output=True
        )
        subprocess.run(["tar", "x"], cwd=tree, input=archive.stdout, check=True)
        package = Path(folder, "autoshard")  # as it is installed
        package.mkdir()
        for part in (*sorted((tree / "autoshard").iterdir()), tree / "passes", tree / "runtime"):
            (package / part.name).symlink_to(part)
        command = [sys.executable, str(tree / "tests/replay/replay.py"), "--detail", row]
        environment = {**os.environ, "PYTHONPATH": folder}
        made = subprocess.run(
            command, env=environment, check=True, stdout=subprocess.PIPE, text=True
        )
        return made.stdout


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--all", action="store_true", help="the rows of a release too")
    parser.add_argument("--only", default="", help="rows with this text")
    parser.add_argument("--against", type=Path, help="a file of lines to compare with")
    parser.add_argument("--detail", metavar="ROW", help="the texts behind one row")
    parser.add_argument("--since", metavar="COMMIT", help="with --detail: differences from there")
    asked = parser.parse_args()
    gc.disable()  # graphs live on: to look through them takes a third of the time
    if asked.detail:
        now = detail(asked.detail)
        if asked.since is None:
            print(now, end="")
            return 0
        before = detail_at(asked.detail, asked.since)
        texts = (before.splitlines(), now.splitlines())
        print("\n".join(difflib.unified_diff(*texts, asked.since, "here", lineterm="")))
        return int(before != now)
    from replay_rows import every, quick

    made = lines([row for row in (every() if asked.all else quick()) if asked.only in row])
    if asked.against is None:
        print("\n".join(made))
        return 0
    before_lines = [
        line
        for line in asked.against.read_text().splitlines()
        if line.startswith("#") or asked.only in line
    ]
    found = moved(before_lines, made)
    print("\n".join(found) or f"{len(made) - 2} rows as they were")
    return int(bool(found))


if __name__ == "__main__":
    raise SystemExit(main())
