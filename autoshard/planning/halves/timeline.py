"""The order in which two halves of a graph run, so that each one's collectives pass unnoticed.

A list schedule on one queue of compute and one of collectives. Each half keeps the order that it
has; it runs until it would wait for a collective, then the other one does. Of two that could run,
the one does that has computed less, unless the other starts its next collective sooner and is then
no further than this one will be at its own: a norm between a reduce-scatter and a gather so runs
in the midst of the other half's products.

What is of neither half runs where it stands, as soon as what it reads is there.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import NamedTuple


class Scheduled(NamedTuple):
    """An operator. half: 0, 1, or None. seconds: of compute. sends: seconds of the collective that
    it starts. awaits: the number of the job that started the one it waits for. inputs: the jobs
    that it reads, all of them earlier."""

    half: int | None
    seconds: float = 0.0
    sends: float = 0.0
    awaits: int | None = None
    inputs: tuple[int, ...] = ()


class Interleaved(NamedTuple):
    """order: of jobs, by number. seconds: until all are done."""

    order: list[int]
    seconds: float


def interleave(jobs: Sequence[Scheduled]) -> Interleaved:
    """The order in which jobs run, given in an order in which they can."""
    return _ListSchedule(jobs).timeline()


class _ListSchedule:
    def __init__(self, jobs: Sequence[Scheduled]) -> None:
        self.jobs = jobs
        self.missing = [len(set(job.inputs)) for job in jobs]
        self.users: list[list[int]] = [[] for _ in jobs]
        for i, job in enumerate(jobs):
            for source in set(job.inputs):
                self.users[source].append(i)
        self.queues = [
            [i for i, job in enumerate(jobs) if job.half == half][::-1] for half in (0, 1)
        ]
        self.ready = [i for i, job in enumerate(jobs) if job.half is None and not self.missing[i]]
        self.until_start = self._until_start()
        self.now = self.free = 0.0
        self.computed = [0.0, 0.0]
        self.arrival: dict[int, float] = {}
        self.order: list[int] = []

    def timeline(self) -> Interleaved:
        current = 0
        while any(self.queues):
            heads = {half: self.queues[half][-1] for half in (0, 1) if self.queues[half]}
            while self.ready and self.ready[0] < max(heads.values()):
                self._run(heapq.heappop(self.ready))
            able = [half for half, head in heads.items() if not self.missing[head]]
            if not able:
                self._run(heapq.heappop(self.ready))
                continue
            current = self._next(able, heads, current)
            self._run(self.queues[current].pop())
        while self.ready:
            self._run(heapq.heappop(self.ready))
        return Interleaved(self.order, max([self.now, *self.arrival.values()]))

    def _next(self, able: list[int], heads: dict[int, int], current: int) -> int:
        """The half that runs, of those that could but for what they wait for."""
        least = min(self._stall(heads[half]) for half in able)
        able = [half for half in able if self._stall(heads[half]) == least]
        able.sort(key=lambda half: (self.computed[half], half != current))
        behind, ahead = able[0], able[-1]
        end, other = (self.computed[h] + self.until_start[heads[h]] for h in (behind, ahead))
        sooner = self.until_start[heads[ahead]] < self.until_start[heads[behind]]
        return ahead if sooner and other <= end * (1 + 1e-9) else behind

    def _run(self, i: int) -> None:
        job = self.jobs[i]
        if job.half is not None:
            self.computed[job.half] += job.seconds
        self.now += self._stall(i) + job.seconds
        if job.sends:
            self.free = self.arrival[i] = max(self.now, self.free) + job.sends
        self.order.append(i)
        for user in self.users[i]:
            self.missing[user] -= 1
            if not self.missing[user] and self.jobs[user].half is None:
                heapq.heappush(self.ready, user)

    def _stall(self, i: int) -> float:
        """Seconds from now until the collective has arrived that a job waits for."""
        awaits = self.jobs[i].awaits
        return 0.0 if awaits is None else max(0.0, self.arrival.get(awaits, 0.0) - self.now)

    def _until_start(self) -> list[float]:
        """Of each job of a half the seconds of compute until its half starts a collective."""
        found = [math.inf] * len(self.jobs)
        for queue in self.queues:
            following = math.inf
            for i in queue:
                job = self.jobs[i]
                following = job.seconds + (0.0 if job.sends else following)
                found[i] = following
        return found
