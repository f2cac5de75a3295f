"""Schedules of a pipeline: for each rank the order of its work, as data.

    gpipe        F0 F1 F2 F3 .  .  B0 B1 B2 B3      all forwards, then all backwards
    1f1b         F0 F1 B0 F2 B1 F3 B2 .  B3         rank i keeps at most p - i micro-batches
    interleaved  F0a F1a F0b F1b B0b F2a ...        v stages a rank: the model goes around v times
    zb1          F0 F1 I0 F2 I1 W0 F3 I2 W1 ...     a backward in two: by inputs, by weights

Where stages take equally long, and a backward as long as two forwards, a step of m micro-batches on
p ranks is idle for (p - 1) / (m + p - 1) of it with the first two, (p - 1) / (v m + p - 1) with
`interleaved`, and (p - 1) / (3 m + p - 1) with `zb1`, m at least p: the gradient by inputs is what
the stage before waits for, and that by weights fills the gaps.

`interleaved` is the order of Megatron-LM (D. Narayanan et al., "Efficient large-scale language
model training on GPU clusters", 2021, section 2.2), `zb1` the ZB-H1 of P. Qi et al., "Zero bubble
pipeline parallelism", 2023, section 3.1.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple

ActionKind = Literal["F", "B", "I", "W"]


class Action(NamedTuple):
    """The work of one micro-batch on one stage: its forward ("F"), its backward ("B"), or the parts
    of that: by inputs ("I"), by weights ("W"). chunk: which of the rank's stages."""

    work: ActionKind
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.work}{self.microbatch}"


class ScheduleShape(NamedTuple):
    """What a schedule is made for; chunks: stages a rank. Stage c p + r is chunk c of rank r."""

    ranks: int
    microbatches: int
    chunks: int = 1


def gpipe(rank: int, shape: ScheduleShape) -> list[Action]:
    """All forwards, then all backwards; of several stages a rank in the order of `interleaved`."""
    numbers, group = range(shape.microbatches * shape.chunks), shape.microbatches // rounds(shape)
    return [_numbered(work, i, group, shape.chunks) for work in ("F", "B") for i in numbers]  # type: ignore[arg-type]


def one_forward_one_backward(rank: int, shape: ScheduleShape) -> list[Action]:
    """Forwards until the first gradient can come, then a backward for each forward."""
    count = shape.microbatches
    ahead = min(shape.ranks - rank - 1, count)
    actions = [Action("F", k) for k in range(ahead)]
    for k in range(count):
        if ahead + k < count:
            actions.append(Action("F", ahead + k))
        actions.append(Action("B", k))
    return actions


def interleaved(rank: int, shape: ScheduleShape) -> list[Action]:
    """The same over groups of micro-batches, as many as there are ranks, that take turns on the
    rank's stages."""
    ranks, count, chunks = shape
    group = count // rounds(shape)
    ahead = min((chunks - 1) * group + 2 * (ranks - rank - 1), count * chunks)
    actions = [_numbered("F", i, group, chunks) for i in range(ahead)]
    for i in range(count * chunks):
        if ahead + i < count * chunks:
            actions.append(_numbered("F", ahead + i, group, chunks))
        actions.append(_numbered("B", i, group, chunks))
    return actions


def _numbered(work: ActionKind, i: int, group: int, chunks: int) -> Action:
    """The i-th forward or backward of a rank whose stages take turns on groups of so many."""
    chunk = i // group % chunks
    number = i // (group * chunks) * group + i % group
    return Action(work, number, chunk if work == "F" else chunks - 1 - chunk)


def zero_bubble(rank: int, shape: ScheduleShape) -> list[Action]:
    """1f1b, where a gradient by weights is computed `rank` micro-batches after that by inputs."""
    actions: list[Action] = []
    for each in one_forward_one_backward(rank, shape):
        if each.work == "F":
            actions.append(each)
            continue
        actions.append(Action("I", each.microbatch))
        if each.microbatch >= rank:
            actions.append(Action("W", each.microbatch - rank))
    late = range(max(0, shape.microbatches - rank), shape.microbatches)
    return [*actions, *(Action("W", k) for k in late)]


SCHEDULES: dict[str, Callable[[int, ScheduleShape], list[Action]]] = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "interleaved": interleaved,
    "zb1": zero_bubble,
}
"""By the name that the option `schedule` has: of a rank."""


def rounds(shape: ScheduleShape) -> int:
    """Into how many groups `interleaved` divides the micro-batches."""
    return max(1, shape.microbatches // shape.ranks)


def is_possible(schedule: str, shape: ScheduleShape) -> bool:
    """Whether a schedule exists: the groups of `interleaved` are of one size."""
    return schedule != "interleaved" or shape.microbatches % rounds(shape) == 0


def forwards(microbatches: int, chunks: int = 1) -> list[Action]:
    """The forwards alone, where nothing is differentiated."""
    return [Action("F", k, c) for k in range(microbatches) for c in range(chunks)]


def most_kept(schedule: str, shape: ScheduleShape, rank: int) -> list[int]:
    """The most micro-batches of which each of a rank's stages keeps the activations."""
    return list(map(max, zip(*_kept(schedule, shape, rank))))


def kept_at_once(schedule: str, shape: ScheduleShape, rank: int) -> list[int]:
    """The micro-batches of which a rank's stages keep the activations when these are most in all:
    stages of one rank are not at their most at once."""
    return list(max(_kept(schedule, _shorter(schedule, shape), rank), key=sum))


def _kept(schedule: str, shape: ScheduleShape, rank: int) -> Iterator[tuple[int, ...]]:
    """Of how many micro-batches each of a rank's stages keeps the activations, by the action."""
    alive = [0] * shape.chunks
    for each in SCHEDULES[schedule](rank, shape):
        alive[each.chunk] += {"F": 1, "I": 0}.get(each.work, -1)
        yield tuple(alive)


class Timeline(NamedTuple):
    """When a schedule's actions run: (start, end) of each, a rank a list. idle: the part of the
    time between the first start and the last end in which ranks wait."""

    spans: list[list[tuple[float, float]]]
    seconds: float
    idle: float


def timeline(
    schedule: str,
    microbatches: int,
    forward: Sequence[float],
    backward: Sequence[float],
    chunks: int = 1,
) -> Timeline:
    """The times of a schedule whose transfers cost nothing. forward, backward: of each stage; each
    half of a backward takes half of it."""
    shape = ScheduleShape(len(forward) // chunks, microbatches, chunks)
    orders = [SCHEDULES[schedule](rank, shape) for rank in range(shape.ranks)]
    done: dict[tuple[int, ActionKind, int] | None, float] = {None: 0.0}
    spans: list[list[tuple[float, float]]] = [[] for _ in orders]
    while any(len(span) < len(order) for span, order in zip(spans, orders)):
        for rank, order in enumerate(orders):
            own, end = spans[rank], spans[rank][-1][1] if spans[rank] else 0.0
            while len(own) < len(order):
                work, number, chunk = action = order[len(own)]
                stage = chunk * shape.ranks + rank
                begin = done.get(_needs(stage, len(forward), action))
                if begin is None:
                    break
                begin = max(begin, end)
                part = 1 if work == "B" else 0.5
                end = begin + (forward[stage] if work == "F" else part * backward[stage])
                own.append((begin, end))
                done[stage, "B" if work == "I" else work, number] = end
    seconds = max(span[-1][1] for span in spans)
    busy = sum(end - begin for span in spans for begin, end in span)
    return Timeline(spans, seconds, 1 - busy / (seconds * shape.ranks) if seconds else 0.0)


_ROUNDS = 4
"""After so many rounds of as many micro-batches as there are ranks, a schedule repeats itself."""


def _shorter(schedule: str, shape: ScheduleShape) -> ScheduleShape:
    """The same order with fewer micro-batches, of which a rank keeps as many."""
    ranks, count, _ = shape
    rest = count % ranks
    if schedule == "gpipe" or (schedule == "interleaved" and rest):
        return shape
    return shape._replace(microbatches=min(count, _ROUNDS * ranks + rest))


class Duration(NamedTuple):
    """Seconds of a step, and the part of them that ranks wait."""

    seconds: float
    idle: float


def duration(
    schedule: str,
    microbatches: int,
    forward: Sequence[float],
    backward: Sequence[float],
    chunks: int = 1,
) -> Duration:
    """That of a `timeline`. Of many micro-batches the first are timed, and the others take as long
    as the last of those, but for a rank that is busy from its first forward to its last backward.
    """
    shape = ScheduleShape(len(forward) // chunks, microbatches, chunks)
    few = _shorter(schedule, shape).microbatches
    given = forward, backward, chunks
    more = few + shape.ranks
    if more >= microbatches:
        return Duration(*timeline(schedule, microbatches, *given)[1:])
    first, second = (timeline(schedule, count, *given).seconds for count in (few, more))
    each = list(map(sum, zip(forward, backward)))
    seconds = second + (microbatches - more) * (second - first) / shape.ranks
    part = 0.0 if schedule == "zb1" else 1.0  # ranks before do not wait for its last action
    for rank in range(shape.ranks):
        busy = microbatches * sum(each[rank :: shape.ranks])
        seconds = max(seconds, sum(forward[:rank]) + busy + part * sum(backward[:rank]))
    idle = 1 - microbatches * sum(each) / (seconds * shape.ranks) if seconds else 0.0
    return Duration(seconds, idle)


def _needs(stage: int, stages: int, action: Action) -> tuple[int, ActionKind, int] | None:
    """What must be done before an action besides the rank's own actions before it."""
    k = action.microbatch
    if action.work == "F":
        return (stage - 1, "F", k) if stage else None
    if action.work == "W":
        return stage, "B", k
    return (stage + 1, "B", k) if stage + 1 < stages else (stage, "F", k)


def picture(schedule: str, ranks: int, microbatches: int, chunks: int = 1) -> str:
    """The schedule as text, a rank a line, where a backward takes as long as two forwards.

    With several stages a rank they have letters.
    """
    stages = ranks * chunks
    times = timeline(schedule, microbatches, [1.0] * stages, [2.0] * stages, chunks)
    width = len(str(microbatches - 1)) + 2 + (chunks > 1)
    lines = []
    for rank, spans in enumerate(times.spans):
        line = [" " * width] * round(times.seconds)
        order = SCHEDULES[schedule](rank, ScheduleShape(ranks, microbatches, chunks))
        for action, (begin, end) in zip(order, spans):
            letter = chr(ord("a") + action.chunk) if chunks > 1 else ""
            line[round(begin)] = f"{action}{letter}".ljust(width)
            line[round(begin) + 1 : round(end)] = [".".ljust(width)] * (round(end - begin) - 1)
        lines.append(f"stage {rank}  {''.join(line).rstrip()}")
    return "\n".join(lines)
