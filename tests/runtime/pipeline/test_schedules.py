"""Schedules: every action once, in an order that ranks can keep, as idle as the formula says."""

from __future__ import annotations

import random

import pytest

from autoshard.runtime.pipeline.schedules import (
    SCHEDULES,
    Action,
    ScheduleShape,
    duration,
    is_possible,
    kept_at_once,
    most_kept,
    picture,
    timeline,
)

SHAPES = [
    *(
        ScheduleShape(1, 3),
        ScheduleShape(2, 1),
        ScheduleShape(2, 4),
        ScheduleShape(4, 2),
        ScheduleShape(4, 9),
        ScheduleShape(8, 16),
    ),
    *(
        ScheduleShape(2, 4, 2),
        ScheduleShape(4, 4, 2),
        ScheduleShape(4, 6, 3),
        ScheduleShape(4, 2, 2),
        ScheduleShape(1, 3, 2),
    ),
]


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_schedule_does_all_and_is_idle_as_the_formula_says(
    name: str, shape: ScheduleShape
) -> None:
    if (shape.chunks > 1) != (name == "interleaved") or not is_possible(name, shape):
        pytest.skip("not of this schedule")
    ranks, count, chunks = shape
    stages = ranks * chunks
    times = timeline(name, count, [1.0] * stages, [2.0] * stages, chunks)
    turns = {"interleaved": chunks, "zb1": 3}.get(name, 1)
    if turns == 1 or count >= ranks:
        assert times.idle == pytest.approx((ranks - 1) / (turns * count + ranks - 1))
    works = ("F", "I", "W") if name == "zb1" else ("F", "B")
    for rank in range(ranks):
        actions = SCHEDULES[name](rank, shape)
        each = [Action(work, k, c) for work in works for k in range(count) for c in range(chunks)]  # type: ignore[arg-type]
        assert sorted(actions) == sorted(each)
        alive = [[0] * chunks]  # after each action
        for one in (one for one in actions if one.work != "I"):
            change = 1 if one.work == "F" else -1
            alive.append([n + change * (c == one.chunk) for c, n in enumerate(alive[-1])])
        at_once = kept_at_once(name, shape, rank)
        assert at_once in alive and sum(at_once) == max(map(sum, alive)) > sum(alive[-1]) == 0
        assert most_kept(name, shape, rank) == [max(each) for each in zip(*alive)]


@pytest.mark.parametrize("name", SCHEDULES)
def test_many_micro_batches_last_as_long_as_their_timeline(name: str) -> None:
    ranks, chunks, draw = 4, 2 if name == "interleaved" else 1, random.Random(7)
    for count in (8, 20, 24, 36, 37):
        if not is_possible(name, ScheduleShape(ranks, count, chunks)):
            continue
        forward, backward = ([n + draw.random() for _ in range(ranks * chunks)] for n in (4, 9))
        times = timeline(name, count, forward, backward, chunks)
        found = duration(name, count, forward, backward, chunks)
        assert found.seconds == pytest.approx(times.seconds, rel=0.005)
        assert found.idle == pytest.approx(times.idle, abs=0.005)


def test_groups_of_an_interleaved_schedule_are_of_one_size() -> None:
    assert not is_possible("interleaved", ScheduleShape(4, 9, 2)) and is_possible(
        "1f1b", ScheduleShape(4, 9)
    )


@pytest.mark.parametrize(
    ("name", "shape", "kept"),
    [
        ("gpipe", ScheduleShape(4, 8), [[8], [8], [8], [8]]),
        ("1f1b", ScheduleShape(4, 8), [[4], [3], [2], [1]]),
        ("zb1", ScheduleShape(4, 8), [[4], [4], [4], [4]]),
        ("interleaved", ScheduleShape(2, 4, 2), [[4, 2], [3, 1]]),
    ],
)
def test_how_many_microbatches_a_stage_keeps(
    name: str, shape: ScheduleShape, kept: list[list[int]]
) -> None:
    assert [most_kept(name, shape, rank) for rank in range(shape.ranks)] == kept


def test_the_picture() -> None:
    assert picture("1f1b", 2, 3).splitlines() == [
        "stage 0  F0 F1       B0 .  F2 B1 .     B2 .",
        "stage 1     F0 B0 .  F1 B1 .  F2 B2 .",
    ]
    assert picture("zb1", 2, 2).splitlines() == [
        "stage 0  F0 F1    I0 W0 I1 W1",
        "stage 1     F0 I0 F1 I1 W0 W1",
    ]
    assert picture("interleaved", 2, 2, 2).splitlines()[1] == (
        "stage 1      F0a F1a F0b B0b .   F1b B1b .   B0a .   B1a ."
    )
