"""A good assignment of a problem that is too wide for the exact minimum, and how good it may be.

Source: R. Dechter and I. Rish, "Mini-buckets: a general scheme for bounded inference", Journal of
the ACM 50, 2003. A bucket whose sum would be too large is split, and each part is minimised by
itself: what is left is a lower bound of the minimum. Before that the parts are made to agree on
what they have in common, which makes the bound tighter (moment matching, A. Ihler et al.,
"Join-graph based cost-shifting schemes", Uncertainty in Artificial Intelligence, 2012). The
assignment is read off the parts; where it costs no more than the bound it is the minimum. An
unrolled recurrence, whose steps all read the same weights, is solved so in thousandths of the work.
"""

import heapq
import math
from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np

from autoshard.planning.solver.elimination import (
    Buckets,
    Factor,
    Repeated,
    Table,
    aligned,
    condition,
    elimination_order,
    minimise,
)

_EASY = 2**12
_SWEEPS = 3


class MiniBuckets(Buckets):
    """A pass of bucket elimination in which no table has more than `limit` entries. sizes: of the
    domains. No assignment costs less than `cost`, and that of `assignment` is a good one."""

    def __init__(
        self, factors: Sequence[Factor], order: Sequence[int], sizes: Sequence[int], limit: int
    ) -> None:
        super().__init__(factors, order)
        self._sizes, self._limit = sizes, limit
        for variable, bucket in self.filled():
            for part in self._agreed(variable, bucket) if bucket else ():
                self.place(Factor(part.scope[1:], part.table.min(axis=0)))

    def _agreed(self, variable: int, bucket: list[Factor]) -> list[Factor]:
        """The sums of the bucket's parts, the variable first, with equal minima over what all of
        them have in common."""
        parts = [self._sum(variable, part) for part in self._parts(bucket)]
        if len(parts) == 1:
            return parts
        shared = set.intersection(*(set(part.scope) for part in parts))
        minima = [
            part.table.min(axis=tuple(i for i, v in enumerate(part.scope) if v not in shared))
            for part in parts
        ]
        mean: Table = sum(minima) / len(minima)  # type: ignore[assignment]
        common = tuple(v for v in parts[0].scope if v in shared)
        agreed = []
        for part, least in zip(parts, minima):
            more = np.full_like(mean, np.inf)  # what one part forbids
            np.subtract(mean, least, out=more, where=np.isfinite(mean))
            table = part.table + aligned(Factor(common, more), part.scope)
            agreed.append(Factor(part.scope, table))
        return agreed

    def _parts(self, bucket: list[Factor]) -> list[list[Factor]]:
        """The bucket's tables in as few groups as may be, the large ones first; a table joins the
        group to which it adds the fewest variables."""
        scopes: list[set[int]] = []
        groups: list[list[Factor]] = []
        for factor in sorted(bucket, key=lambda f: (-f.table.size, f.scope)):
            joined = [scope.union(factor.scope) for scope in scopes]
            sizes = [math.prod(self._sizes[v] for v in scope) for scope in joined]
            small = [i for i, size in enumerate(sizes) if size <= self._limit]
            if small:
                at = min(small, key=lambda i: (len(joined[i]) - len(scopes[i]), i))
                scopes[at] = joined[at]
                groups[at].append(factor)
            else:
                scopes.append(set(factor.scope))
                groups.append([factor])
        return groups

    def _sum(self, variable: int, part: list[Factor]) -> Factor:
        scope = {v for factor in part for v in factor.scope}
        axes = (variable, *sorted(scope - {variable}))
        total = np.zeros([self._sizes[v] for v in axes])
        for factor in part:
            total += aligned(factor, axes)
        self.work += total.size
        self.width = max(self.width, len(axes))
        return Factor(axes, total)


_Tables = dict[int, dict[int, Factor]]


class _Conditioned(Buckets):
    """Bucket elimination of what is left where some variables are `fixed`. Where one of them gets
    another value, only those buckets are computed again to which that makes a difference."""

    def __init__(self, factors: list[Factor], order: Sequence[int], fixed: dict[int, int]) -> None:
        super().__init__((), order)
        self._factors, self._order = factors, order
        # of each bucket, and last of what has no variable left: factors, then messages, by number
        self._tables: list[dict[int, Factor]] = [{} for _ in range(len(order) + 1)]
        self._reading: dict[int, list[int]] = {variable: [] for variable in fixed}
        for i, factor in enumerate(factors):
            for variable in factor.scope:
                if variable in fixed:
                    self._reading[variable].append(i)
        self._set(fixed, *self._with(fixed, range(len(factors))))

    def try_value(self, variable: int, value: int) -> None:
        """Give a fixed variable another value, if that costs less."""
        if value == self.fixed[variable]:
            return
        fixed = self.fixed | {variable: value}
        cost, new = self._with(fixed, self._reading[variable])
        if cost < self.cost:
            self._set(fixed, cost, new)

    def filled(self) -> list[tuple[int, list[Factor]]]:
        """The buckets in order, with the messages that they get."""
        return [(v, list(tables.values())) for v, tables in zip(self._order, self._tables)]

    def _set(self, fixed: dict[int, int], cost: float, new: _Tables) -> None:
        self.fixed, self.cost = fixed, cost
        for at, tables in new.items():
            self._tables[at].update(tables)

    def _with(self, fixed: dict[int, int], others: Sequence[int]) -> tuple[float, _Tables]:
        """The cost with these values, with which some factors are others, and the tables that are,
        by their bucket."""
        new: _Tables = defaultdict(dict)
        known, last = Repeated(), len(self._order)
        for i, factor in zip(others, condition([self._factors[i] for i in others], fixed)):
            new[self.bucket(factor)][i] = factor
        waiting = sorted(new)
        while waiting and (at := heapq.heappop(waiting)) < last:
            bucket = list((self._tables[at] | new[at]).values())
            message, entries = minimise(self._order[at], bucket, known)
            self.work += entries
            to, number = self.bucket(message), len(self._factors) + at
            before = self._tables[to].get(number)
            if before is None or not np.array_equal(before.table, message.table):
                if to not in new:
                    heapq.heappush(waiting, to)
                new[to][number] = message
        left = (self._tables[last] | new[last]).values()
        return sum(float(factor.table) for factor in left), new


def refined(
    factors: list[Factor], sizes: Sequence[int], chosen: dict[int, int]
) -> tuple[dict[int, int], int]:
    """A better assignment than a good one, and the entries computed: the variables without which
    every table is small get another value each in turn, and the rest is the cheapest exactly."""
    scopes = [factor.scope for factor in factors]
    cutset: tuple[int, ...] = ()
    while True:
        order, buckets = elimination_order(sizes, scopes, without=cutset)
        large = [b for b in buckets if math.prod(sizes[v] for v in b) > _EASY]
        if not large:
            break
        count = Counter(v for bucket in large for v in bucket)
        cutset = (*cutset, max(count, key=lambda v: (count[v], -v)))
    run = _Conditioned(factors, order, {variable: chosen.get(variable, 0) for variable in cutset})
    for _ in range(_SWEEPS):
        before = run.cost
        for variable in cutset:
            for value in range(sizes[variable]):
                run.try_value(variable, value)
        if run.cost == before:
            break
    return (chosen if math.isinf(run.cost) else run.assignment() | run.fixed), run.work
