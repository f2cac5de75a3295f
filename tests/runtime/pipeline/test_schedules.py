"""Schedules: every action once, in an order that stages can keep, as idle as the formula says."""

from __future__ import annotations

import pytest

from autoshard.runtime.pipeline.schedules import SCHEDULES, Action, picture, timeline


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("stages", "microbatches"), [(1, 3), (2, 1), (2, 4), (4, 2), (4, 9)])
def test_a_schedule_is_idle_as_the_formula_says(name: str, stages: int, microbatches: int) -> None:
    times = timeline(name, microbatches, [1.0] * stages, [2.0] * stages)
    assert times.idle == pytest.approx((stages - 1) / (microbatches + stages - 1))
    for stage in range(stages):
        actions = SCHEDULES[name](stage, stages, microbatches)
        works = [Action(work, k) for work in ("F", "B") for k in range(microbatches)]
        assert sorted(actions, reverse=True) == sorted(works, reverse=True)


@pytest.mark.parametrize(("name", "kept"), [("gpipe", [8, 8, 8, 8]), ("1f1b", [4, 3, 2, 1])])
def test_how_many_microbatches_a_stage_keeps(name: str, kept: list[int]) -> None:
    for stage, most in enumerate(kept):
        alive = peak = 0
        for action in SCHEDULES[name](stage, 4, 8):
            alive += 1 if action.work == "F" else -1
            peak = max(peak, alive)
        assert peak == most


def test_the_picture() -> None:
    assert picture("1f1b", 2, 3).splitlines() == [
        "stage 0  F0 F1       B0 .  F2 B1 .     B2 .",
        "stage 1     F0 B0 .  F1 B1 .  F2 B2 .",
    ]
