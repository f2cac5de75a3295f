"""Schedules of a pipeline: for each stage the order of its forwards and backwards, as data.

    gpipe   F0 F1 F2 F3 .  .  B0 B1 B2 B3      all forwards, then all backwards
    1f1b    F0 F1 B0 F2 B1 F3 B2 .  B3         stage i keeps at most p - i micro-batches

Both are idle for (p - 1) / (m + p - 1) of a step of m micro-batches on p equal stages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

Work = Literal["F", "B"]


class Action(NamedTuple):
    """The forward ("F") or the backward ("B") of one micro-batch on one stage."""

    work: Work
    microbatch: int

    def __str__(self) -> str:
        return f"{self.work}{self.microbatch}"


def gpipe(stage: int, stages: int, microbatches: int) -> list[Action]:
    """All forwards, then all backwards."""
    numbers = range(microbatches)
    return [*(Action("F", k) for k in numbers), *(Action("B", k) for k in numbers)]


def one_forward_one_backward(stage: int, stages: int, microbatches: int) -> list[Action]:
    """Forwards until the first gradient can come, then a backward for each forward."""
    ahead = min(stages - stage - 1, microbatches)
    actions = [Action("F", k) for k in range(ahead)]
    for k in range(microbatches):
        if ahead + k < microbatches:
            actions.append(Action("F", ahead + k))
        actions.append(Action("B", k))
    return actions


SCHEDULES: dict[str, Callable[[int, int, int], list[Action]]] = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
}
"""By the name that the option `schedule` has: of (stage, stages, microbatches)."""


def forwards(microbatches: int) -> list[Action]:
    """The forwards alone, where nothing is differentiated."""
    return [Action("F", k) for k in range(microbatches)]


class Timeline(NamedTuple):
    """When a schedule's actions run: (start, end) of each, a stage a list. idle: the part of the
    time between the first start and the last end in which stages wait."""

    spans: list[list[tuple[float, float]]]
    seconds: float
    idle: float


def timeline(
    schedule: str, microbatches: int, forward: Sequence[float], backward: Sequence[float]
) -> Timeline:
    """The times of a schedule whose transfers cost nothing. forward, backward: of each stage."""
    stages = len(forward)
    orders = [SCHEDULES[schedule](s, stages, microbatches) for s in range(stages)]
    done: dict[tuple[int, Action], float] = {}
    spans: list[list[tuple[float, float]]] = [[] for _ in range(stages)]
    while any(len(span) < len(order) for span, order in zip(spans, orders)):
        for stage, order in enumerate(orders):
            while len(spans[stage]) < len(order):
                action = order[len(spans[stage])]
                after = _needs(stage, stages, action)
                if any(each not in done for each in after):
                    break
                begin = max([done[each] for each in after], default=0.0)
                begin = max(begin, spans[stage][-1][1] if spans[stage] else 0.0)
                cost = forward[stage] if action.work == "F" else backward[stage]
                spans[stage].append((begin, begin + cost))
                done[stage, action] = begin + cost
    seconds = max(span[-1][1] for span in spans)
    busy = sum(end - begin for span in spans for begin, end in span)
    return Timeline(spans, seconds, 1 - busy / (seconds * stages) if seconds else 0.0)


def _needs(stage: int, stages: int, action: Action) -> list[tuple[int, Action]]:
    """What must be done before an action besides the stage's own actions before it."""
    if action.work == "F":
        return [(stage - 1, action)] if stage else []
    return (
        [(stage + 1, action)] if stage + 1 < stages else [(stage, Action("F", action.microbatch))]
    )


def picture(schedule: str, stages: int, microbatches: int) -> str:
    """The schedule as text, a stage a line, where a backward takes as long as two forwards."""
    times = timeline(schedule, microbatches, [1.0] * stages, [2.0] * stages)
    width = len(str(microbatches - 1)) + 2
    lines = []
    for stage, spans in enumerate(times.spans):
        line = [" " * width] * round(times.seconds)
        order = SCHEDULES[schedule](stage, stages, microbatches)
        for action, (begin, end) in zip(order, spans):
            line[round(begin)] = str(action).ljust(width)
            line[round(begin) + 1 : round(end)] = [".".ljust(width)] * (round(end - begin) - 1)
        lines.append(f"stage {stage}  {''.join(line).rstrip()}")
    return "\n".join(lines)
