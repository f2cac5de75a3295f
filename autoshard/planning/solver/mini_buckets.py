"""A good assignment of a problem that is too wide for the exact minimum, and how good it may be.

Source: R. Dechter and I. Rish, "Mini-buckets: a general scheme for bounded inference", Journal of
the ACM 50, 2003. A bucket whose sum would be too large is split, and each part is minimised by
itself: what is left is a lower bound of the minimum. Before that the parts are made to agree on
what they have in common, which makes the bound tighter (moment matching, A. Ihler et al.,
"Join-graph based cost-shifting schemes", Uncertainty in Artificial Intelligence, 2012). The
assignment is read off the parts; where it costs no more than the bound it is the minimum. An
unrolled recurrence, whose steps all read the same weights, is solved so in thousandths of the work.
"""

import itertools
import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from autoshard.planning.solver.elimination import (
    Buckets,
    Elimination,
    Factor,
    Repeated,
    Table,
    aligned,
    condition,
    elimination_order,
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


def refined(
    factors: list[Factor], sizes: Sequence[int], chosen: dict[int, int]
) -> tuple[dict[int, int], int]:
    """A better assignment than a good one, and the entries computed: the variables without which
    every table is small get another value each in turn, and the rest is the cheapest exactly."""
    scopes, known = [factor.scope for factor in factors], Repeated()
    cutset: tuple[int, ...] = ()
    while True:
        order, buckets = elimination_order(sizes, scopes, without=cutset)
        large = [b for b in buckets if math.prod(sizes[v] for v in b) > _EASY]
        if not large:
            break
        count = Counter(v for bucket in large for v in bucket)
        cutset = (*cutset, max(count, key=lambda v: (count[v], -v)))
    work, least = 0, math.inf
    fixed = {variable: chosen.get(variable, 0) for variable in cutset}
    for _ in range(_SWEEPS):
        before = least
        for variable, value in itertools.product(cutset, range(max(sizes))):
            if value >= sizes[variable] or (value == fixed[variable] and least < math.inf):
                continue
            tried = fixed | {variable: value}
            run = Elimination(condition(factors, tried), order, known)
            work += run.work
            if run.cost < least:
                least, fixed, chosen = run.cost, tried, run.assignment() | tried
        if least == before:
            break
    return chosen, work
