"""What people do around a training step, each beside serial: `scenarios/table.py` has the list."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from scenarios.job import Sizes, run_scenario
from scenarios.table import EXPECTED_TO_FAIL, SCENARIOS

PATIENCE = 60.0


def compare(pool: Any, name: str, sizes: Sizes, folder: Path, inner: str = "aot_eager") -> None:
    """The scenario on every rank; what differs from serial is the failure's text."""
    results = pool(run_scenario, name, sizes, str(folder), inner, pool_timeout=PATIENCE)
    wrong = [f"rank {r}: {line}" for r, (lines, _) in enumerate(results) for line in lines]
    if wrong:
        more = f"\nand {len(wrong) - 6} more" if len(wrong) > 6 else ""
        pytest.fail(f"{name} on {sizes}:\n" + "\n".join(wrong[:6]) + more, pytrace=False)


def listed(mesh: str) -> list[Any]:
    """The scenarios, with those that are known to fail on this mesh."""
    rows = []
    for name in SCENARIOS:
        reason = EXPECTED_TO_FAIL.get(f"{mesh}: {name}", EXPECTED_TO_FAIL.get(name))
        marks = [] if reason is None else [pytest.mark.xfail(reason=reason, strict=False)]
        rows.append(pytest.param(name, marks=marks, id=name))
    return rows


@pytest.mark.parametrize("name", listed("tp"))
def test_tensor_parallel(gloo2: Any, tmp_path: Path, name: str) -> None:
    compare(gloo2, name, {"tp": 2}, tmp_path)


@pytest.mark.parametrize("name", listed("dp_shard"))
def test_sharded_data_parallel(gloo2: Any, tmp_path: Path, name: str) -> None:
    compare(gloo2, name, {"dp_shard": 2}, tmp_path)
