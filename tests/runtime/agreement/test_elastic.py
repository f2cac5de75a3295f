"""The example that loses processes: it goes on from its last checkpoint, on the mesh there is.

Slow: torchrun's real restarts, on two and four processes.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

ROOT = Path(__file__).parents[3]
KILLER = Path(__file__).with_name("killed_at_random.py")
EXAMPLE = ROOT / "examples" / "elastic.py"
LONG = 600  # seconds for a job
EVERY = 3

pytestmark = pytest.mark.slow


def train(folder: Path, processes: int, steps: int, kills: list[tuple[int, float]]) -> str:
    """Train to a number of steps under torchrun, with one more start for each kill."""
    launch = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    options = ["--folder", str(folder), "--steps", str(steps), "--every", str(EVERY)]
    done = subprocess.run(
        [sys.executable, "-m", *launch, "--max-restarts", str(len(kills)), str(KILLER)]
        + [json.dumps(kills), str(EXAMPLE), *options, "--inner", "aot_eager"],
        env={**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR"},
        text=True,
        capture_output=True,
        timeout=LONG,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    return done.stdout


def losses(folder: Path) -> list[tuple[int, str]]:
    """Each step and its loss, in the order in which they were taken."""
    lines = (folder / "losses.txt").read_text().splitlines()
    return [(int(step), loss) for step, loss in map(str.split, lines)]


def state(folder: Path, step: int) -> dict[str, torch.Tensor]:
    """The tensors of the checkpoint after a step, whole."""
    where = folder / f"{step:08}"
    known = dcp.FileSystemReader(where).read_metadata().state_dict_metadata
    whole = {
        name: torch.empty(one.size, dtype=one.properties.dtype)
        for name, one in known.items()
        if isinstance(one, TensorStorageMetadata)
    }
    dcp.load(whole, checkpoint_id=where, no_dist=True)
    return whole


def check_lost(taken: list[tuple[int, str]]) -> None:
    """A start goes on at a checkpoint: at most the steps since the one before the last are lost,
    because a kill may meet the last while it is written."""
    for (before, _), (after, _) in zip(taken, taken[1:]):
        assert after == before + 1 or (after % EVERY == 0 and before - after < 2 * EVERY), taken


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # the test reads alone
@pytest.mark.parametrize("seed", [0])
def test_kills_at_random_moments(tmp_path: Path, seed: int) -> None:
    """On four and then two processes, with a kill on each: losses and state are those of jobs that
    were stopped and started again by hand, bit for bit."""
    draw = random.Random(seed)
    by_hand, killed = tmp_path / "by_hand", tmp_path / "killed"
    for processes, steps in ((4, EVERY), (2, 2 * EVERY)):
        train(by_hand, processes, steps, [])
        kills = [(draw.randrange(processes), draw.uniform(8.0, 40.0))]
        train(killed, processes, steps, kills)
    taken = losses(killed)
    check_lost(taken)
    assert dict(taken) == dict(losses(by_hand)), "the last that each step came to"
    expected, found = state(by_hand, 2 * EVERY), state(killed, 2 * EVERY)
    assert expected.keys() == found.keys() and len(found) > 20
    assert all(torch.equal(found[name], one) for name, one in expected.items())
