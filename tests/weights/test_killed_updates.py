"""A process is killed while weights travel: no half update, and an error on all that are left."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[1] / "helpers" / "ranks" / "killed_updates.py"


def kills(count: int, seed: int, *of: str) -> list[dict[str, Any]]:
    command = [sys.executable, str(SCRIPT), str(count), str(seed), *of]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(one: dict[str, Any]) -> None:
    updates = {said["done"] for said in one["said"]}
    assert len(updates) == 1 and len(one["said"]) == 4 - (one["killed"] < 4)
    for said in one["said"]:
        assert f"update {said['done'] + 1} of 'weights' did not happen" in said["error"]
        if said["rank"] >= 2:  # of the last update that was done, every tensor of every rank
            assert said["versions"] == [float(said["done"])]


def test_a_killed_process_leaves_whole_weights() -> None:
    found = kills(2, seed=1)
    for one in found:
        check(one)
    assert {one["killed"] < 2 for one in found} == {True, False}


@pytest.mark.slow
def test_a_killed_store_leaves_one_decision() -> None:
    """All processes are left, and are of one version, whoever could still read the decision."""
    for one in kills(20, 3, "store"):
        check(one)


@pytest.mark.slow
def test_at_twenty_drawn_moments() -> None:
    found = kills(20, seed=2)
    for one in found:
        check(one)
    assert len({one["killed"] for one in found}) == 4
    assert len({one["said"][0]["done"] for one in found}) > 1
