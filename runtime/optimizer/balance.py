"""Which rank steps which matrix, so that the one with the most to do is done soonest.

The makespan of jobs on identical machines: longest job first, then branch and bound from there.
Most sets need no search, since the first guess meets the lower bound.
"""

import heapq
from collections.abc import Sequence
from typing import NamedTuple

MOST_NODES = 200_000
"""Loads that the search looks at, those of all ranks at each of its nodes: a fifth of a second,
after which the best assignment so far is taken."""

_MOST_JOBS = 500  # the search is as deep as it has jobs

_TICK = 1e-12  # seconds are compared as whole numbers, alike on every rank


class OwnerBalance(NamedTuple):
    """owners: of each job its rank. seconds: of the rank with the most. optimal: whether no other
    assignment is shorter; False where the search ended before it knew."""

    owners: list[int]
    seconds: float
    optimal: bool


def balanced(
    jobs: Sequence[float], given: Sequence[float], most_nodes: int = MOST_NODES
) -> OwnerBalance:
    """The owner of each job, given in seconds; the same on every rank that asks.

    given: seconds that each rank has to work whatever it is assigned.
    """
    ranks, loads = len(given), [round(seconds / _TICK) for seconds in given]
    ticks = [max(round(seconds / _TICK), 0) for seconds in jobs]
    order = sorted(range(len(jobs)), key=lambda job: (-ticks[job], job))
    sizes = [ticks[job] for job in order]
    ranked, worst = _longest_first(sizes, loads)
    least = _lower_bound(sizes, loads)
    most_nodes = max(most_nodes // ranks, 1)
    search = _Search(sizes, ranks, least, worst, ranked, most_nodes)
    if worst > least and len(jobs) > _MOST_JOBS:
        search.nodes = most_nodes
    elif worst > least:
        search.place(0, loads, max(loads))
    owners = [0] * len(jobs)
    for job, owner in zip(order, search.best):
        owners[job] = owner
    return OwnerBalance(owners, search.worst * _TICK, search.nodes < most_nodes)


def _longest_first(sizes: Sequence[int], given: Sequence[int]) -> tuple[list[int], int]:
    loads = [(load, rank) for rank, load in enumerate(given)]
    heapq.heapify(loads)
    owners = []
    for size in sizes:
        load, rank = heapq.heappop(loads)
        owners.append(rank)
        heapq.heappush(loads, (load + size, rank))
    return owners, max(load for load, _ in loads)


def _lower_bound(sizes: Sequence[int], given: Sequence[int]) -> int:
    """Some rank has no less than the mean, what is given, the longest, two of the `ranks + 1`
    longest."""
    ranks = len(given)
    bounds = [-(-(sum(sizes) + sum(given)) // ranks), max(given), *sizes[:1]]
    if len(sizes) > ranks:
        bounds.append(sizes[ranks - 1] + sizes[ranks])
    return max(bounds)


class _Search:
    """Branch and bound over jobs, longest first, each to ranks of different loads."""

    def __init__(
        self, sizes: list[int], ranks: int, least: int, worst: int, best: list[int], nodes: int
    ) -> None:
        self.sizes, self.ranks, self.least = sizes, ranks, least
        self.worst, self.best = worst, best
        self.nodes, self._most = 0, nodes
        self._owners = [0] * len(sizes)
        self._left = [*(sum(sizes[job:]) for job in range(len(sizes))), 0]

    def place(self, job: int, loads: list[int], top: int) -> None:
        """Assign jobs from `job` on. top: the largest of the loads so far, below `worst`."""
        if job == len(self.sizes):
            self.worst, self.best = top, list(self._owners)
            return
        self.nodes += 1
        room = sum(max(self.worst - 1 - load, 0) for load in loads)
        if room < self._left[job] or self.nodes >= self._most:
            return
        size = self.sizes[job]
        tried = set()
        for rank in sorted(range(self.ranks), key=loads.__getitem__):
            load = loads[rank] + size
            if load >= self.worst or self.worst == self.least:
                return  # the others have more
            if load in tried:
                continue
            tried.add(load)
            self._owners[job], loads[rank] = rank, load
            self.place(job + 1, loads, max(top, load))
            loads[rank] = load - size
