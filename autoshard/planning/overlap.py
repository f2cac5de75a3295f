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
    now = queue = asked = 0.0
    for segment in segments:
        if segment.gather:
            queue = max(queue, asked) + segment.gather
            now = max(now, queue)
        asked = now  # the next gather starts where this one was waited for
        now += segment.forward
    asked = now
    for segment in reversed(segments):
        if segment.regather:
            queue = max(queue, asked) + segment.regather
            now = max(now, queue)
        asked = now
        now += segment.backward
        if segment.reduce:
            queue = max(queue, now) + segment.reduce
    return max(now, queue)
