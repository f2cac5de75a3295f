"""The cheapest cut of a chain of operators into pipeline stages, exactly.

The operators stand in the order of the graph; a stage is a run of them. A step of m micro-batches
on p stages takes

    (m - 1) * slowest + the sum over stages

where a stage takes the time of its operators, of the transfers at both of its ends, its share of
the time of the update and, where it does not fit a budget otherwise, of what it computes again.

A dynamic programme finds the least sum under a bound on the slowest stage; the least sum is a step
function of that bound, of which the best point is found by bisection over the costs that stages can
have, leaving out what a lower bound rules out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

_PARTS = 16
"""Bounds on one stage of several of a rank that are tried."""


@dataclass(frozen=True, kw_only=True)
class Chain:
    """The operators of a graph, in order, as the search sees them.

    seconds: of each operator for one micro-batch, forward and backward. sent: seconds of the
    transfers over the cut before each operator, both ways; one more entry, the first and the last
    are 0; infinite where no cut may be. kept: bytes each operator keeps of a micro-batch between
    its forward and its backward. stored: for each parameter its bytes in training, and the
    operators that read it; update: seconds of the optimizer's step for each of these bytes. homes:
    the stages on which an operator may be, where that is known. again: ways to keep less, by rising
    time: the part of `kept` that is left, bytes that are there beside it, and seconds for each of
    the operators'.
    """

    seconds: Sequence[float]
    sent: Sequence[float]
    kept: Sequence[float]
    stored: Sequence[tuple[float, Sequence[int]]] = ()
    update: float = 0.0
    homes: Mapping[int, frozenset[int]] = field(default_factory=dict)
    again: Sequence[tuple[float, float, float]] = ()


@dataclass(frozen=True)
class StageCut:
    """cuts: the first operator of each stage but the first. slowest, seconds: of a micro-batch on
    the slowest stage, and of a step. memory: bytes of each stage at its peak, the
    budget where something is computed again."""

    cuts: tuple[int, ...]
    slowest: float
    seconds: float
    memory: tuple[float, ...]


def cut_stages(
    chain: Chain,
    ranks: int,
    microbatches: int,
    budget: float | None = None,
    kept: Sequence[int] | None = None,
) -> StageCut | None:
    """The cut of least step time, the earliest cuts of several; None where no cut fits.

    kept: the micro-batches of which each stage keeps the activations; None: min(m, p - i) of stage
    i of p, as in 1F1B. budget: bytes that a rank may hold, which has the stages r, r + ranks, ...

    A dynamic programme has one stage before it, not a rank's. So where ranks have several and the
    cheapest cut does not fit, no stage may hold more than a part of the budget, the largest with
    which all ranks fit; the least part tried is what a rank's stages have if they are equal.
    """
    if kept is None:
        kept = [min(microbatches, ranks - stage) for stage in range(ranks)]
    chunks, limits = len(kept) // ranks, [budget]
    if budget is not None and chunks > 1:
        parts = (1 - i / _PARTS * (1 - 1 / chunks) for i in range(_PARTS + 1))
        limits = [None, *(part * budget for part in parts)]
    for most in limits:
        found = _CutSearch(chain, kept, microbatches, most).run()
        if found is None or budget is None or chunks == 1:
            return found
        if max(sum(found.memory[rank::ranks]) for rank in range(ranks)) <= budget:
            return found
    return None


class _CutSearch:
    """The tables of one search: entry (a, b) is the stage of operators a to b - 1."""

    def __init__(
        self, chain: Chain, live: Sequence[int], microbatches: int, budget: float | None
    ) -> None:
        self.microbatches = microbatches
        n = self.n = len(chain.seconds)
        sent = np.asarray(chain.sent, float)
        stored, kept = _stored_bytes(chain, n), _sums(chain.kept)
        busy = _sums(chain.seconds)
        self.cost = busy + sent[:, None] + sent[None, :]
        self.cost += stored * (chain.update / microbatches)
        self.cost[np.tril_indices(n + 1)] = np.inf
        counts = {count: stored + count * kept for count in live}
        self.memory = [counts[count] for count in live]
        self.cost_of: list[Array] = []
        for stage in range(len(live)):
            cost = self.cost  # one table for all, where nothing tells stages apart
            away = [float(stage not in chain.homes.get(i, (stage,))) for i in range(n)]
            if any(away):
                cost = np.where(_sums(away) > 0, np.inf, cost)
            if budget is not None:
                over = self.memory[stage] > budget
                more = np.where(over, np.inf, 0.0)
                for part, beside, seconds in reversed(chain.again):
                    fits = stored + live[stage] * part * kept + beside <= budget
                    more = np.where(over & fits, seconds * busy, more)
                cost = cost + more
                self.memory[stage] = np.where(over, budget, self.memory[stage])
            self.cost_of.append(cost)
        self.tables = list({id(cost): cost for cost in self.cost_of}.values())

    def run(self) -> StageCut | None:
        bounds = np.unique(np.concatenate([c[np.isfinite(c)] for c in self.tables]))
        if not len(bounds):
            return None
        low, high = 0, len(bounds) - 1
        if self._least(bounds[high]) is None:
            return None
        while low < high:  # the least bound that has a solution
            middle = (low + high) // 2
            low, high = (low, middle) if self._least(bounds[middle]) else (middle + 1, high)
        return self._best(bounds, low, len(bounds) - 1)

    def _best(self, bounds: Array, low: int, high: int) -> StageCut:
        ends = {i: self._known(bounds[i]) for i in (low, high)}
        best = min(ends[low], ends[high], key=lambda cut: cut.seconds)
        open_ = [(low, high)]
        while open_:
            low, high = open_.pop()
            # between the two: no stage faster than the bound at `low`, no sum less than at `high`
            total = ends[high].seconds - (self.microbatches - 1) * ends[high].slowest
            reached = (self.microbatches - 1) * bounds[low] + total
            same = ends[low].cuts == ends[high].cuts
            if high - low < 2 or reached >= best.seconds or same:
                continue
            middle = (low + high) // 2
            ends[middle] = self._known(bounds[middle])
            best = min(best, ends[middle], key=lambda cut: cut.seconds)
            open_ += [(middle, high), (low, middle)]
        return best

    def _known(self, bound: float) -> StageCut:
        found = self._least(bound)
        assert found is not None
        return found

    def _least(self, bound: float) -> StageCut | None:
        """The cut of the least sum whose stages take no longer than `bound`."""
        sums = np.full(self.n + 1, np.inf)
        sums[0] = 0
        before: list[NDArray[np.int64]] = []
        within = {id(cost): np.where(cost <= bound, cost, np.inf) for cost in self.tables}
        for cost in self.cost_of:
            whole = sums[:, None] + within[id(cost)]
            before.append(np.argmin(whole, axis=0))
            sums = whole[before[-1], np.arange(self.n + 1)]
        if not np.isfinite(sums[self.n]):
            return None
        ends = [self.n]
        for found in reversed(before):
            ends.append(int(found[ends[-1]]))
        ends.reverse()
        spans = list(zip(ends, ends[1:]))
        costs = [float(cost[a, b]) for cost, (a, b) in zip(self.cost_of, spans)]
        memory = tuple(float(m[a, b]) for m, (a, b) in zip(self.memory, spans))
        seconds = (self.microbatches - 1) * max(costs) + sum(costs)
        return StageCut(tuple(ends[1:-1]), max(costs), seconds, memory)


def _sums(values: Sequence[float]) -> Array:
    """Entry (a, b): the sum of values a to b - 1."""
    total = np.concatenate([[0.0], np.cumsum(np.asarray(values, float))])
    return total[None, :] - total[:, None]


def _stored_bytes(chain: Chain, n: int) -> Array:
    """Entry (a, b): bytes of the parameters that operators a to b - 1 read, each counted once."""
    found = np.zeros((n + 1, n + 1))
    for nbytes, readers in chain.stored:
        previous = -1
        for reader in sorted(set(readers)):  # counted at its first reader in the stage
            found[previous + 1 : reader + 1, reader + 1 :] += nbytes
            previous = reader
    return found
