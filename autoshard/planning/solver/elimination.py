"""Bucket elimination: an order for the variables, and the pass over them.

Source: R. Dechter, "Bucket elimination: a unifying framework for reasoning", Artificial
Intelligence 113, 1999. Take one variable, add up every table it appears in, minimise over it, and
put what is left back as a new table over its neighbours.

One order is by the smallest table. The other joins as few variables as it can (weighted min-fill:
U. Kjærulff, "Triangulation of graphs: algorithms giving small total state space", report R 90-09,
Aalborg University, 1990). It takes longer to find, and is worth it where domains are large: on the
pairs of states of two axes its tables have a tenth of the entries.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Table = NDArray[np.float64]

# Sizes as logarithms in fixed point: sums of integers do not depend on the order of additions.
LOG_UNIT = 1 << 20
# Entries of a message from which on its sum is made value by value of the variable.
_WIDE = 256


@dataclass(frozen=True)
class Factor:
    """A table of costs over the variables of `scope`, ascending, one axis each."""

    scope: tuple[int, ...]
    table: Table


def elimination_order(
    sizes: Sequence[int], scopes: Sequence[tuple[int, ...]], without: tuple[int, ...] = ()
) -> tuple[list[int], list[tuple[int, ...]]]:
    """A greedy order in which to eliminate, and the variables of each table it makes.

    The next variable is the one whose elimination makes the smallest table (product of the
    domains of it and its neighbours; the lower index of equals). Variables of one value and
    those in `without` take no part. The weights are kept up to date edge by edge, so that a
    variable with thousands of neighbours costs no more than another.
    """
    bits = [round(math.log2(size) * LOG_UNIT) for size in sizes]
    dropped = set(without)
    neighbours: list[dict[int, None]] = [{} for _ in sizes]
    active = [v for v, size in enumerate(sizes) if size > 1 and v not in dropped]
    weight = list(bits)

    def join(group: Sequence[int]) -> None:
        for a, b in itertools.combinations(group, 2):
            if b not in neighbours[a]:
                neighbours[a][b] = neighbours[b][a] = None
                weight[a] += bits[b]
                weight[b] += bits[a]

    for scope in scopes:
        join([v for v in scope if v not in dropped])
    heap = [(weight[v], v) for v in active]
    heapq.heapify(heap)
    order: list[int] = []
    tables: list[tuple[int, ...]] = []
    done = [False] * len(sizes)
    while heap:
        known, variable = heapq.heappop(heap)
        if done[variable] or known != weight[variable]:
            continue
        done[variable] = True
        group = list(neighbours[variable])
        order.append(variable)
        tables.append((variable, *group))
        for other in group:
            del neighbours[other][variable]
            weight[other] -= bits[variable]
        join(group)
        for other in group:
            heapq.heappush(heap, (weight[other], other))
    return order, tables


class Repeated:
    """Messages of buckets that were eliminated before: repeated layers share their tables, and so
    each is eliminated once.

    Two buckets are equal where the same arrays stand in the same places, so the tables of equal
    factors must be one array (`FactorGraph.add` keeps it).
    """

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], tuple[list[Table], Table]] = {}
        self._small: dict[tuple[Any, ...], Table] = {}

    def table(self, table: Table) -> Table:
        """The one array for a table of these entries; for few of them, as they are compared."""
        return self._small.setdefault((table.shape, table.tobytes()), table)

    def message(
        self, tables: list[Table], places: Sequence[tuple[int, ...]], make: Callable[[], Table]
    ) -> Table:
        """The message of a bucket with these tables, whose variables stand in these places."""
        key = (tuple(map(id, tables)), tuple(places))
        if key not in self._known:
            self._known[key] = tables, make()  # the tables are kept, or another got their id
        return self._known[key][1]


class Elimination:
    """A pass of bucket elimination; `assignment` walks the buckets backwards.

    repeated: what is known from buckets before.
    """

    def __init__(
        self, factors: list[Factor], order: list[int], repeated: Repeated | None = None
    ) -> None:
        repeated = repeated or Repeated()
        self.width = self.work = 0
        self.cost = 0.0
        self.conflict: tuple[int, ...] = ()
        self._buckets: list[tuple[int, list[Factor]]] = []
        position = {variable: i for i, variable in enumerate(order)}
        waiting: list[list[Factor]] = [[] for _ in order]

        def place(factor: Factor) -> None:
            if factor.scope:
                waiting[min(position[v] for v in factor.scope)].append(factor)
            else:
                self.cost += float(factor.table)

        for factor in factors:
            place(factor)
        for variable, bucket in zip(order, waiting, strict=True):
            if not bucket:
                continue
            message, entries = _minimise(variable, bucket, repeated)
            self._buckets.append((variable, bucket))
            self.width = max(self.width, len(message.scope) + 1)
            self.work += entries
            if not self.conflict and np.isinf(message.table).all():
                self.conflict = (variable, *message.scope)
                self.cost = math.inf
                return
            place(message)

    def assignment(self) -> dict[int, int]:
        """The best value of every variable."""
        return read_back(self._buckets)


def read_back(buckets: Sequence[tuple[int, list[Factor]]]) -> dict[int, int]:
    """A value for every variable, last eliminated first: of least cost to its bucket."""
    chosen: dict[int, int] = {}
    for variable, bucket in reversed(buckets):
        cost = sum(
            f.table[tuple(slice(None) if v == variable else chosen.get(v, 0) for v in f.scope)]
            for f in bucket
        )
        chosen[variable] = int(np.argmin(cost))
    return chosen


def _minimise(variable: int, bucket: list[Factor], repeated: Repeated) -> tuple[Factor, int]:
    """The sum of the bucket's tables minimised over `variable`, and the entries of that sum."""
    scope = tuple(sorted({v for f in bucket for v in f.scope} - {variable}))
    axes = (variable, *scope)
    place = {v: i for i, v in enumerate(axes)}
    # Small tables first: broadcasting then works on full-size arrays as few times as possible.
    bucket = sorted(bucket, key=lambda f: (f.table.size, f.scope))
    sizes = {v: size for f in bucket for v, size in zip(f.scope, f.table.shape)}

    def least() -> Table:
        return _least([aligned(f, axes) for f in bucket])

    places = [tuple(place[v] for v in f.scope) for f in bucket]
    table = repeated.message([f.table for f in bucket], places, least)
    return Factor(scope, table), math.prod(sizes.values())


def _least(tables: list[Table]) -> Table:
    """The sum of tables, least over their first axis.

    A wide sum is made for one value of that at a time: what numpy adds keeps the layout of the
    tables, in which that axis may be the innermost, and a minimum over such a one is slow.
    """
    size, *rest = np.broadcast_shapes(*(t.shape for t in tables))
    if len(tables) == 1 or math.prod(rest) < _WIDE:
        total = tables[0]
        for table in tables[1:]:
            total = total + table
        found: Table = np.minimum.reduce(total, axis=0)
        return found
    least, one = np.full(rest, np.inf), np.empty(rest)
    for i in range(size):
        np.add(tables[0][i], tables[1][i], out=one)
        for table in tables[2:]:
            np.add(one, table[i], out=one)
        np.minimum(least, one, out=least)
    return least


def aligned(factor: Factor, axes: tuple[int, ...]) -> Table:
    """The factor's table with one axis for each of `axes`, of size 1 where it has no such one."""
    place = {v: i for i, v in enumerate(factor.scope)}
    table = factor.table.transpose([place[v] for v in axes if v in place])
    sizes = iter(table.shape)
    return table.reshape([next(sizes) if v in place else 1 for v in axes])


def condition(factors: list[Factor], fixed: dict[int, int]) -> list[Factor]:
    """The factors that remain when some variables are given values."""
    if not fixed:
        return factors
    return [
        Factor(
            tuple(v for v in f.scope if v not in fixed),
            f.table[tuple(fixed.get(v, slice(None)) for v in f.scope)],
        )
        for f in factors
    ]


def fill_order(
    sizes: Sequence[int], scopes: Sequence[tuple[int, ...]], without: tuple[int, ...] = ()
) -> tuple[list[int], list[tuple[int, ...]]]:
    """As `elimination_order`; next is the variable whose elimination joins pairs of the smallest
    sum of domains (as logarithms), of equals the one of the smallest table, then the lower index.
    """
    bits = [round(math.log2(size) * LOG_UNIT) for size in sizes]
    dropped = set(without)
    active = [v for v, size in enumerate(sizes) if size > 1 and v not in dropped]
    neighbours: list[dict[int, None]] = [{} for _ in sizes]
    for scope in scopes:
        for a, b in itertools.permutations([v for v in scope if v not in dropped], 2):
            neighbours[a][b] = None
    linked = [set(near) for near in neighbours]

    def key(variable: int) -> tuple[int, int, int]:
        near = linked[variable]
        # of a neighbour, those that it is not joined to yet: few are looked at, even of a hub's
        fill = sum(bits[a] * (len(near) - 1 - len(near & linked[a])) for a in near)
        return fill, bits[variable] + sum(bits[other] for other in near), variable

    latest = {variable: key(variable) for variable in active}
    heap = list(latest.values())
    heapq.heapify(heap)
    order: list[int] = []
    tables: list[tuple[int, ...]] = []
    while heap:
        known = heapq.heappop(heap)
        variable = known[2]
        if latest.get(variable) != known:
            continue
        del latest[variable]
        group = list(neighbours[variable])
        order.append(variable)
        tables.append((variable, *group))
        for other in group:
            del neighbours[other][variable]
            linked[other].discard(variable)
        joins = [(a, b) for a, b in itertools.combinations(group, 2) if b not in neighbours[a]]
        for a, b in joins:
            neighbours[a][b] = neighbours[b][a] = None
            linked[a].add(b)
            linked[b].add(a)
        # what has a new neighbour, or a new join of two of its neighbours, has another key
        changed = dict.fromkeys(group)
        for a, b in joins:
            changed.update(dict.fromkeys(linked[a] & linked[b]))
        for one in changed:
            latest[one] = key(one)
            heapq.heappush(heap, latest[one])
    return order, tables
