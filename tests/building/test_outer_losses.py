"""Pipelines under loops that compute the loss outside of the compiled model, on processes."""

from __future__ import annotations

from typing import Any

import pytest

from joined_batch import Sizes
from outer_losses import train
from side_by_side import TOLERANCE


def check(results: list[dict[str, Any]], schedule: str) -> None:
    for result in results:
        numbers = {key: result[key] for key in ("loss", "gradient", "norm", "read", "weights")}
        assert all(number < TOLERANCE for number in numbers.values()), result
        assert all(f"and not {schedule}" in text for text in result["said"]) and result["said"]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("encoder", {}),
        pytest.param("gpt2", {}, marks=pytest.mark.slow),
        pytest.param("vit", {"pipeline": {"schedule": "zb1"}}, marks=pytest.mark.slow),
    ],
)
def test_three_steps_are_serial_ones(gloo2: Any, name: str, options: dict[str, Any]) -> None:
    schedule = options.get("pipeline", {}).get("schedule", "1f1b")
    check(gloo2(train, name, {"pp": 2}, 2, options), schedule)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sizes", "micro"),
    [
        ("gpt2", {"pp": 2, "tp": 2}, 2),
        ("vit", {"pp": 2, "tp": 2}, 1),
        ("encoder", {"pp": 2, "tp": 2}, 1),
        ("gpt2", {"pp": 2, "dp_shard": 2}, 2),
        ("vit", {"pp": 2, "dp_replicate": 2}, 2),
    ],
)
def test_beside_other_axes(gloo4: Any, name: str, sizes: Sizes, micro: int) -> None:
    check(gloo4(train, name, sizes, micro, {}), "1f1b")
