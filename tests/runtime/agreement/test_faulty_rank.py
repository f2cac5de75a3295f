"""One rank of real processes stops, ends, fails, forks or trains another model: the others say so.

Slow: processes of their own for each fault. `test_store_exchange.py` has the same in threads.
"""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("faulty_rank.py")
LONG = 170.0  # seconds for a job; what comes before is a matter of the machine's load
LIMIT = 6.0
PATIENT = 150.0  # the limit where a rank is found missing without it

pytestmark = pytest.mark.slow

TP, DATA, BOTH = {"tp": 2}, {"dp_shard": 2}, {"dp_shard": 2, "tp": 2}
NOT_THERE = "rank 3: did not come to a collective of axis "
ENDED = "rank 1: has ended, after ValueError: a broken record ("
READ = "the read of body.up.weight ("
SAVED = "the read of a stored tensor of shape ("
PLACES = "models_plain.py:", "in a comparison on axis dp_shard"
ELSEWHERE = ["in the forward of a compiled graph, which rank 0 has not come to", "faulty_rank.py:"]
CASES = [
    ("stops", BOTH, [NOT_THERE, "CollectiveError"]),
    ("late_stops", TP, ["rank 1: did not arrive within 6 seconds at the batch"]),
    ("stops0", TP, ["the store of the process group did not answer within"]),
    ("late_dies0", TP, ["the store of the process group is gone"]),
    ("dies", TP, ["rank 1: died without a word", "axis tp", "models_plain.py:"]),
    ("fails", DATA, ["CollectiveError", ENDED, "faulty_rank.py:"]),
    ("late_fails", TP, [ENDED, "faulty_rank.py:"]),
    ("reads", TP, [READ, "faulty_rank.py:", "every rank has to do it"]),
    ("saves0", TP, [SAVED, *ELSEWHERE]),
    ("saves0", BOTH, [SAVED, *ELSEWHERE]),
    ("saves0", {"dp_replicate": 2}, []),
    ("freezes", DATA, ["requires_grad of body.up.weight was set"]),
    ("forks", TP, []),
]


def errors(folder: Path, fault: str, mesh: dict[str, int]) -> dict[int, str]:
    """What each rank that could say so has raised."""
    world = math.prod(mesh.values())
    helpers = SCRIPT.parents[2] / "helpers"
    paths = [str(helpers), str(helpers / "ranks"), os.environ.get("PYTHONPATH", "")]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    shared = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "WORLD_SIZE": str(world),
    }
    arguments = [str(folder), fault, json.dumps(mesh), str(PATIENT if "saves" in fault else LIMIT)]
    started = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), *arguments],
            env={**shared, "RANK": str(rank)},
            stderr=subprocess.DEVNULL,
        )
        for rank in range(world)
    ]
    at_fault = 0 if fault.endswith("0") else world - 1
    end = time.monotonic() + LONG
    try:
        for rank, process in enumerate(started):
            if rank != at_fault:
                process.wait(max(1.0, end - time.monotonic()))
        if "stops" not in fault:
            code = started[at_fault].wait(max(1.0, end - time.monotonic()))
            assert ("dies" in fault) == (code == -signal.SIGKILL)
    finally:
        for process in started:
            process.kill()
            process.wait()
    files = {rank: folder / f"error.{rank}" for rank in range(world)}
    return {rank: path.read_text() for rank, path in files.items() if path.exists()}


@pytest.mark.parametrize(
    ("fault", "mesh", "texts"), CASES, ids=[f"{fault}-{'-'.join(mesh)}" for fault, mesh, _ in CASES]
)
def test_one_rank_is_at_fault(
    tmp_path: Path, fault: str, mesh: dict[str, int], texts: list[str]
) -> None:
    said = errors(tmp_path, fault, mesh)
    silent = "stops" in fault or "dies" in fault
    ranks = {"stops": [0, 1, 2]}.get(fault, [1] if fault.endswith("0") else [0])
    if not silent:
        ranks = [*range(math.prod(mesh.values()))]
    assert sorted(said) == ranks, said
    if not texts:
        assert set(said.values()) == {""}, said
    for rank in ranks:
        if fault.endswith("fails") and rank == 1:
            assert said[rank] == "ValueError: a broken record"
        else:
            assert all(text in said[rank] for text in texts), said
        if fault == "stops":  # rank 1 waits in no collective of the graph
            assert any(place in said[rank] for place in PLACES[: 1 + (rank == 1)]), said
