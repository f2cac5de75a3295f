"""A training script for processes of its own, in which one rank does what FAULT says at step 2.

    RANK=... WORLD_SIZE=... python faulty_rank.py FOLDER FAULT MESH TIMEOUT

MESH is JSON. Each rank writes what its training raised to FOLDER/error.RANK, or "".
"""

from __future__ import annotations

import atexit
import contextlib
import io
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from models_plain import MLP, Regression

STEP = 2


def stops(model: Any) -> None:
    """It is frozen, as by a debugger or a full disk."""
    os.kill(os.getpid(), signal.SIGSTOP)


def dies(model: Any) -> None:
    """It ends without a word."""
    os.kill(os.getpid(), signal.SIGKILL)


def fails(model: Any) -> None:
    """It raises in the user's own code."""
    raise ValueError("a broken record")


def reads(model: Any) -> None:
    """It alone reads a parameter."""
    from autoshard.runtime.agreement import announced
    from autoshard.runtime.mesh import axes_of
    from autoshard.runtime.parameters import unshard_parameter

    weight = model.body.up._parameters["weight"]
    with announced("read of body.up.weight", axes_of(weight.device_mesh)):
        unshard_parameter(weight)


def saves(model: Any) -> None:
    """It alone saves, as code for one device does under `if rank == 0`."""
    torch.save(model.state_dict(), io.BytesIO())


def freezes(model: Any) -> None:
    """It trains fewer parameters than the others."""
    for parameter in model.body.up.parameters():
        parameter.requires_grad_(False)


def forks(model: Any) -> None:
    """It has a child that ends as worker processes do."""
    child = os.fork()
    if child == 0:
        atexit._run_exitfuncs()
        os._exit(0)  # destructors of torch's groups would end the parent's connections
    os.waitpid(child, 0)


FAULTS = {f.__name__: f for f in (stops, dies, fails, reads, saves, freezes, forks)}


def main(fault: str, sizes: dict[str, int], limit: float) -> None:
    """Four steps; the last rank, or rank 0 for a fault that ends in 0, is at fault."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    at_fault = 0 if fault.endswith("0") else world - 1
    grows = "late" in fault
    torch.manual_seed(0)
    model = Regression(MLP())
    options = {"inner": "aot_eager", "mesh": sizes, "timeout": limit}
    step = torch.compile(model, backend="autoshard", options=options)
    for number in range(4):
        if number == STEP and rank == at_fault:
            FAULTS[fault.rstrip("0").removeprefix("late_")](model)
        rows = 4 + 2 * number if grows else 4  # another shape compares before it computes
        x = torch.ones(rows, 8, 64)
        step(x=x, y=x).backward()


if __name__ == "__main__":
    folder, name, mesh, seconds = sys.argv[1:]
    text = ""
    try:
        main(name, json.loads(mesh), float(seconds))
    except Exception as error:
        from autoshard.runtime import compat

        cause = compat.backend_error(error) or error
        text = f"{type(cause).__name__}: {cause}"
        raise
    finally:
        with contextlib.suppress(NameError):
            (Path(folder) / f"error.{os.environ['RANK']}").write_text(text)
