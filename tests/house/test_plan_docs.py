"""What docs/planning.md shows: the Python runs, and the cluster file is the built-in machine."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import autoshard
from autoshard.planning.cost.clusters import cluster

PAGE = (Path(__file__).parents[2] / "docs" / "planning.md").read_text()


def block(language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    assert found is not None
    return found[1]


def test_the_python_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(block("python"), {})
    assert capsys.readouterr().out
    assert autoshard.Plan.load("plan.json").mesh


def test_the_cluster_file_is_the_built_in_h100(tmp_path: Path) -> None:
    (tmp_path / "file.yaml").write_text(block("yaml"))
    read, known = cluster(str(tmp_path / "file.yaml")), cluster("h100")
    assert (read.inside, read.between, read.per_node) == (
        known.inside,
        known.between,
        known.per_node,
    )
    assert read.efficiency == known.efficiency
    assert read.device.flops == known.device.flops
    assert read.device.memory_bytes == known.device.memory_bytes
