"""A killed rank ends the job with an error, and training goes on from the last checkpoint."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("killed_rank.py")
LONG = 200  # seconds for a job; the process group's own limit, 20, must end a broken one before

pytestmark = pytest.mark.slow


def environment(**more: str) -> dict[str, str]:
    helpers = SCRIPT.parents[2] / "helpers"
    paths = [str(helpers), str(helpers / "ranks"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **more}


def ranks(folder: Path, *arguments: int) -> list[int]:
    """Run the script in two processes that nothing supervises; their exit codes."""
    folder.mkdir(exist_ok=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    started = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(folder), *map(str, arguments)],
            env=environment(RANK=str(rank), WORLD_SIZE="2", **world),
            stderr=subprocess.DEVNULL,
        )
        for rank in range(2)
    ]
    try:
        return [process.wait(LONG) for process in started]
    finally:
        for process in started:
            process.kill()


def losses(folder: Path) -> dict[int, str]:
    lines = (folder / "losses.txt").read_text().splitlines()
    return {int(step): loss for step, loss in map(str.split, lines)}


def test_a_killed_rank_ends_the_job_and_training_resumes(tmp_path: Path) -> None:
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    assert ranks(straight, 4) == [0, 0]

    left, killed = ranks(broken, 4, 2)
    assert killed == -signal.SIGKILL
    assert left not in (0, -signal.SIGKILL), "it waits for the killed rank"
    assert (broken / "error.0").read_text(), "an error of its own, not a signal"
    assert sorted(losses(broken)) == [0, 1]

    launch = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    supervised = subprocess.run(
        [sys.executable, "-m", *launch, str(SCRIPT), str(broken), "4", "3"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=LONG,
    )
    assert supervised.returncode != 0
    assert "SIGKILL" in supervised.stderr, supervised.stderr[-2000:]
    assert sorted(losses(broken)) == [0, 1, 2], "it went on at the checkpoint of step 1"

    assert ranks(broken, 4) == [0, 0]
    assert losses(broken) == losses(straight)
