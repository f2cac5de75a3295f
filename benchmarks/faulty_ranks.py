"""One rank of a job dies, stops, raises or does something else than the others: what all say.

    python benchmarks/faulty_ranks.py [--faults dies ...] [--axes tp ...] [--json PATH]

Each job trains on two processes, forked from this one, on one axis; the last rank is at fault at
its third step, or from the start where it is another option, model or dtype. A job is clean where
every rank that lives ends with an error that says why, or where the axis allows the difference
(TRAINS) and all train to their end; silent where a rank ends without one. Seconds are those from
the fault to the last rank's error; a stopped rank is found by the job's `timeout`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autoshard.runtime import compat
from llama_model import Shape
from step_models import Mixture

AXES = ("tp", "cp", "pp", "dp_shard", "dp_replicate", "ep")
FAULTS = (
    *("dies", "stops", "raises", "options", "graphs", "dtypes", "shapes", "batches", "branches"),
)
DATA = ("dp_shard", "dp_replicate", "ep")
#: What data-parallel ranks may do apart: other operators on the same parameters are a branch.
TRAINS = {
    *((fault, axis) for fault in ("shapes", "batches", "graphs") for axis in DATA),
    ("branches", "dp_replicate"),
}
STEPS, AT, LONGEST = 5, 2, 240.0


class Net(nn.Module):
    """Two ways of one size into a body; the mean square."""

    def __init__(self, axis: str, other: bool) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(64, 64), nn.Linear(64, 64)
        mixes = axis == "ep"
        self.body = Mixture(Shape(width=64, hidden=64)) if mixes else nn.Linear(64, 64)
        self.last, self.other = nn.Linear(64, 64), other

    def forward(self, x: torch.Tensor, right: bool) -> torch.Tensor:
        x = torch.tanh(self.right(x) if right else self.left(x))
        x = self.last(torch.tanh(self.body(x)))
        return (x.relu() if self.other else x).square().mean()


def work(folder: str, fault: str, axis: str, rank: int, port: int, limit: float) -> None:
    """One rank: writes when the fault begins, and what it raised, and when."""
    os.environ.update(
        RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=f"{port}"
    )
    sys.stderr = open(os.devnull, "w")
    odd, text = rank == 1, ""
    try:
        train(Path(folder), fault if odd else "", axis, limit)
    except Exception as error:
        cause = compat.backend_error(error) or error
        text = f"{type(cause).__name__}: {cause}"
    told = Path(folder) / f"ended.{rank}.part"
    told.write_text(json.dumps([time.time(), text]))
    told.rename(told.with_suffix(""))
    if text:  # as a script ends that does not catch it, but for forked state
        from autoshard.runtime.agreement import worlds

        sys.last_value = RuntimeError(text)
        worlds._leave()
        os._exit(1)


def train(folder: Path, fault: str, axis: str, limit: float) -> None:
    """Some steps, with the fault of this rank, if any."""

    def begins() -> None:
        (folder / "began").write_text(repr(time.time()))

    if fault in ("options", "graphs", "dtypes"):
        begins()
    torch.manual_seed(0)
    dtype = torch.float64 if fault == "dtypes" else torch.float32
    model = Net(axis, fault == "graphs").to(dtype)
    options: dict[str, Any] = {"mesh": {axis: 2}, "inner": "eager", "timeout": limit}
    options["same_inputs"] = {"batches": "always"}
    if fault == "options":
        options["same_inputs"]["compare_every"] = 7
    step: Any = torch.compile(model, backend="autoshard", options=options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for number in range(STEPS):
        x = torch.randn(4, 8, 64, generator=torch.Generator().manual_seed(number)).to(dtype)
        if number == AT and fault:
            if fault in ("dies", "stops", "raises", "shapes", "batches", "branches"):
                begins()
            if fault == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            if fault == "stops":
                os.kill(os.getpid(), signal.SIGSTOP)
            if fault == "raises":
                raise ValueError("a broken record")
            if fault == "batches":
                x = x + 1
            if fault == "shapes":
                x = torch.cat([x, x])
        step(x, number == AT and fault == "branches").backward()
        optimizer.step()
        optimizer.zero_grad()


def job(fault: str, axis: str) -> dict[str, Any]:
    """What became of one job."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("fork")
    limit = 20.0 if fault == "stops" else 120.0
    with tempfile.TemporaryDirectory() as folder:
        arguments = [(folder, fault, axis, rank, port, limit) for rank in range(2)]
        ranks = [context.Process(target=work, args=each) for each in arguments]
        for rank in ranks:
            rank.start()
        living = [rank for rank in range(2) if rank == 0 or fault not in ("dies", "stops")]
        files = [Path(folder) / f"ended.{rank}" for rank in living]
        end = time.monotonic() + LONGEST
        while time.monotonic() < end and not all(file.exists() for file in files):
            time.sleep(0.05)
        told = {r: json.loads(f.read_text()) for r, f in zip(living, files) if f.exists()}
        for process in ranks:
            process.kill()
            process.join()
        began = Path(folder) / "began"
        start = float(began.read_text()) if began.exists() else None
    row = {"fault": fault, "axis": axis, "said": {rank: text for rank, (_, text) in told.items()}}
    if len(told) < len(living) or start is None:
        return {**row, "is": "HANGS"}
    errors = [text for _, text in told.values()]
    seconds = max(when for when, _ in told.values()) - start
    if (fault, axis) in TRAINS:
        return {**row, "is": "ERROR" if any(errors) else "trains"}
    return {**row, "is": "clean" if all(errors) else "SILENT", "seconds": seconds}


def main() -> None:
    """Print a line for each job, and how many were clean."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", nargs="+", default=FAULTS, choices=FAULTS)
    parser.add_argument("--axes", nargs="+", default=AXES, choices=AXES)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = []
    for axis in args.axes:
        for fault in args.faults:
            rows.append(row := job(fault, axis))
            took = f" in {row['seconds']:.1f} s" if "seconds" in row else ""
            said = next((text for text in row["said"].values() if text), "")
            print(f"{axis:13}{fault:10}{row['is']}{took}  {said[:110]!r}", flush=True)
    good = sum(row["is"] in ("clean", "trains") for row in rows)
    died = [row["seconds"] for row in rows if row["fault"] == "dies" and "seconds" in row]
    slowest = f"; at most {max(died):.1f} s after a process died" if died else ""
    print(f"{good} of {len(rows)} are clean{slowest}")
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
