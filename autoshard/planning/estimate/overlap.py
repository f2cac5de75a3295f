"""When a step is over: compute on one queue, data-parallel collectives on another.

A model of what the passes make of the graph (passes/schedule_collectives.py): the gather of a
bucket of parameters starts where the bucket before it is waited for, the reduction of a bucket's
gradients where the last of them is made, and reductions are waited for at the end. Collectives of
the data-parallel axes share one queue in the order of their start, as one communicator has it.
Exposed is what the compute waits: the end of both queues less the compute itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Segment(NamedTuple):
    """The part of a step that starts where a bucket of parameters is first used. Seconds.

    forward, backward: compute. gather: of its parameters, and again in backward where `regather`.
    reduce: of its gradients, over all data-parallel axes.
    """

    forward: float
    backward: float
    gather: float = 0.0
    regather: float = 0.0
    reduce: float = 0.0


def step_seconds(segments: Sequence[Segment]) -> float:
    """Seconds from the first gather to the end of compute and of communication."""
    now = queue = 0.0  # when the compute, and the queue of collectives, are free
    order = [(s.gather, s.forward, 0.0) for s in segments]
    now, queue = _pass(order, now, queue)
    order = [(s.regather, s.backward, s.reduce) for s in reversed(segments)]
    return max(_pass(order, now, queue))


def _pass(
    order: Sequence[tuple[float, float, float]], now: float, queue: float
) -> tuple[float, float]:
    """When compute and queue are free after a pass over (gather, compute, reduce)s in order."""
    ready = 0.0
    for i, (gather, compute, reduce) in enumerate(order):
        if i == 0 and gather:
            ready = queue = max(queue, now) + gather
        now = max(now, ready)
        following = order[i + 1][0] if i + 1 < len(order) else 0.0
        if following:  # starts where this one was waited for
            ready = queue = max(queue, now) + following
        now += compute
        if reduce:
            queue = max(queue, now) + reduce
    return now, queue
