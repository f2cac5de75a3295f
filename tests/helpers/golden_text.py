"""Golden texts: files under tests/golden that a test's output must equal."""

from __future__ import annotations

import os
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "golden"


def golden(name: str, text: str) -> None:
    """Assert that `text` is the content of tests/golden/NAME.txt; UPDATE_GOLDEN=1 rewrites it."""
    path = FOLDER / f"{name}.txt"
    if os.environ.get("UPDATE_GOLDEN") == "1":
        FOLDER.mkdir(exist_ok=True)
        path.write_text(text)
    assert path.exists(), f"no {path.name}: run with UPDATE_GOLDEN=1 and read what it writes"
    assert text == path.read_text(), f"{path.name} differs: read the diff, then UPDATE_GOLDEN=1"
