"""What people do around a training step, each beside serial: `scenarios/table.py` has the list."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from scenarios.job import Sizes, run_scenario
from scenarios.table import (
    BESIDE_STAGES,
    FURTHER,
    LIBRARIES,
    NEEDED,
    ON_STAGES,
    QUICK,
    SCENARIOS,
    WITH_STAGES,
)

PATIENCE = 300.0  # seconds, on a machine that has other things to do


def compare(pool: Any, name: str, sizes: Sizes, folder: Path, inner: str = "aot_eager") -> None:
    """The scenario on every rank; what differs from serial is the failure's text."""
    try:
        results = pool(run_scenario, name, sizes, str(folder), inner, pool_timeout=PATIENCE)
    except Exception:
        pool.stop()  # a collective that ended by its timeout leaves the ranks without connections
        raise
    if any(refused for _, refused in results):
        pool.stop()  # an error of one compilation is the end of a job
    wrong = [f"rank {r}: {line}" for r, (lines, _) in enumerate(results) for line in lines]
    if wrong:
        more = f"\nand {len(wrong) - 6} more" if len(wrong) > 6 else ""
        pytest.fail(f"{name} on {sizes}:\n" + "\n".join(wrong[:6]) + more, pytrace=False)


def listed(
    names: Iterable[str] = SCENARIOS,
    often: Sequence[str] = (),
    turn: int = 0,
    turns: int = 1,
) -> list[Any]:
    """The scenarios, marked slow but for one of `turns` of those that run often. Of the others, CI
    runs one of `turns`, on a mesh another than on the next: what a mesh stores is each scenario's
    in turn."""
    left = [name for name in names if name not in often]
    quick = often[turn::turns]
    return [
        *(
            pytest.param(name, marks=[] if name in quick else [pytest.mark.slow], id=name)
            for name in often
        ),
        *(
            pytest.param(
                name,
                marks=[pytest.mark.slow, *([pytest.mark.exhaustive] if i % turns != turn else [])],
                id=name,
            )
            for i, name in enumerate(left)
        ),
    ]


@pytest.mark.parametrize("name", listed(often=QUICK, turn=0, turns=2))
def test_tensor_parallel(gloo2: Any, tmp_path: Path, name: str) -> None:
    compare(gloo2, name, {"tp": 2}, tmp_path)


@pytest.mark.parametrize("name", listed(often=QUICK, turn=1, turns=2))
def test_sharded_data_parallel(gloo2: Any, tmp_path: Path, name: str) -> None:
    compare(gloo2, name, {"dp_shard": 2}, tmp_path)


@pytest.mark.parametrize("name", listed(QUICK, turns=4))
def test_replicated_data_parallel(gloo2: Any, tmp_path: Path, name: str) -> None:
    compare(gloo2, name, {"dp_replicate": 2}, tmp_path)


@pytest.mark.parametrize("name", listed(WITH_STAGES, often=ON_STAGES, turns=12))
def test_pipeline(gloo2: Any, tmp_path: Path, name: str) -> None:
    compare(gloo2, name, {"pp": 2}, tmp_path)


@pytest.mark.parametrize("axis", ["tp", "dp_shard"])
@pytest.mark.parametrize("name", listed(BESIDE_STAGES, turns=len(BESIDE_STAGES)))
def test_pipeline_beside_an_axis(gloo4: Any, tmp_path: Path, name: str, axis: str) -> None:
    compare(gloo4, name, {"pp": 2, axis: 2}, tmp_path)


@pytest.mark.parametrize("name", listed(FURTHER, turn=0, turns=2))
def test_inductor_tensor_parallel(gloo2: Any, tmp_path: Path, name: str) -> None:
    compare(gloo2, name, {"tp": 2}, tmp_path, "inductor")


@pytest.mark.parametrize("name", listed(FURTHER, turn=1, turns=2))
def test_inductor_sharded_data_parallel(gloo2: Any, tmp_path: Path, name: str) -> None:
    compare(gloo2, name, {"dp_shard": 2}, tmp_path, "inductor")


@pytest.mark.parametrize("name", listed(FURTHER))
def test_two_axes(gloo4: Any, tmp_path: Path, name: str) -> None:
    compare(gloo4, name, {"dp_shard": 2, "tp": 2}, tmp_path)


@pytest.mark.parametrize("mesh", ["tp", "dp_shard"])
@pytest.mark.parametrize("name", listed(LIBRARIES))
def test_libraries(gloo2: Any, tmp_path: Path, name: str, mesh: str) -> None:
    missing = [m for m in NEEDED[name] if importlib.util.find_spec(m) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} is not installed")
    compare(gloo2, name, {mesh: 2}, tmp_path)
