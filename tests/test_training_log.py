"""Two runs beside each other by their logs: the loss and the norm of gradients of each backward."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from autoshard.cli import main
from models_plain import MLP, Regression, vectors


def train(path: str, mesh: dict[str, int] | None = None, odd: int = -1, both: int = 1) -> list[Any]:
    """Five steps, of which step `odd` has another batch; what torch says of each. both: the data-
    parallel ranks, among which a batch is divided."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model = Regression(MLP())
    options: dict[str, Any] = {"inner": "eager", "gradients": {"log": path}}
    if mesh is not None:
        options["mesh"] = mesh
    step: Any = torch.compile(model, backend="autoshard", options=options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for number in range(5):
        batch = vectors(99 if number == odd else number)
        if both > 1:
            rank = torch.distributed.get_rank()
            batch = {name: x.chunk(both)[rank] for name, x in batch.items()}
        loss = step(**batch)
        loss.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
        found.append((loss.item(), norm.item()))
        optimizer.step()
        optimizer.zero_grad()
    return found


def test_a_log_says_where_two_runs_part(tmp_path: Path, capsys: Any) -> None:
    first, again, other = (str(tmp_path / name) for name in ("first", "again", "other"))
    told = train(first)
    train(again)
    train(other, odd=3)
    steps = [json.loads(line) for line in Path(first).read_text().splitlines()]
    assert [(one["loss"], one["grad_norm"]) for one in steps] == told
    assert main(["verify", first, "--against", again]) == 0
    assert "EQUAL" in capsys.readouterr().out
    assert main(["verify", first, "--against", other]) == 1
    said = capsys.readouterr().out
    assert "DIFFERENT from step 3" in said and "step 1:" in said and "step 0:" not in said
    lines = Path(other).read_text().splitlines()
    for wrong in (math.nan, None):
        Path(again).write_text("\n".join([lines[0], json.dumps({**steps[1], "loss": wrong})]))
        assert main(["verify", first, "--against", again]) == 1
        assert "DIFFERENT from step 1" in capsys.readouterr().out
    Path(again).write_text("{}")
    assert main(["verify", first, "--against", again]) == 2
    assert "is not a log of a run" in capsys.readouterr().err
    assert main(["verify", first]) == 2


@pytest.mark.parametrize(
    "mesh", [{"tp": 2}, {"dp_shard": 2}, {"dp_replicate": 2}], ids=lambda mesh: next(iter(mesh))
)
def test_a_sharded_run_beside_the_serial_one(gloo2: Any, tmp_path: Path, mesh: Any) -> None:
    serial, sharded = str(tmp_path / "serial"), str(tmp_path / "sharded")
    train(serial)
    gloo2(train, sharded, mesh, -1, 1 if "tp" in mesh else 2)
    assert main(["verify", sharded, "--against", serial]) == 0
    assert len(Path(sharded).read_text().splitlines()) == 5
