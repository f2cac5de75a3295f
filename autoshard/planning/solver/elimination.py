"""Bucket elimination: an order for the variables, and the pass over them.

Source: R. Dechter, "Bucket elimination: a unifying framework for reasoning", Artificial
Intelligence 113, 1999. Take one variable, add up every table it appears in, minimise over it, and
put what is left back as a new table over its neighbours.

One order is by the smallest table. The other joins as few variables as it can (weighted min-fill:
U. Kjærulff, "Triangulation of graphs: algorithms giving small total state space", report R 90-09,
Aalborg University, 1990). It takes longer to find, and is worth it where domains are large: on the
pairs of states of two axes its tables have a tenth of the entries.
"""

import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
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


class _Joins:
    """Which variables are in a table together, as one after the other is eliminated. weight: of
    each, the entries of the table that its elimination makes, as a logarithm."""

    def __init__(
        self, sizes: Sequence[int], scopes: Sequence[tuple[int, ...]], without: tuple[int, ...]
    ) -> None:
        self.bits = [round(math.log2(size) * LOG_UNIT) for size in sizes]
        self.weight = list(self.bits)
        self.near: list[set[int]] = [set() for _ in sizes]
        dropped = set(without)
        self.active = [v for v in range(len(sizes)) if v not in dropped]
        for scope in scopes:
            self.join([v for v in scope if v not in dropped])

    def join(self, group: Sequence[int]) -> list[tuple[int, int]]:
        """Put variables into one table; the pairs that were in none."""
        pairs = [(a, b) for a, b in itertools.combinations(group, 2) if b not in self.near[a]]
        for a, b in pairs:
            self.near[a].add(b)
            self.near[b].add(a)
            self.weight[a] += self.bits[b]
            self.weight[b] += self.bits[a]
        return pairs

    def order(
        self,
        key: Callable[[int], Any],
        changed: Callable[[list[int], list[tuple[int, int]]], Iterable[int]],
    ) -> tuple[list[int], list[tuple[int, ...]]]:
        """The variables by rising key, the lower index of equals, and those of each table that is
        made. changed: which keys are others, of the neighbours of what is eliminated and the pairs
        that this joins."""
        latest = {variable: key(variable) for variable in self.active}
        heap = [(known, variable) for variable, known in latest.items()]
        heapq.heapify(heap)
        tables: list[tuple[int, ...]] = []
        while heap:
            known, variable = heapq.heappop(heap)
            if latest.get(variable) != known:
                continue
            del latest[variable]
            group = sorted(self.near[variable])
            tables.append((variable, *group))
            for other in group:
                self.near[other].discard(variable)
                self.weight[other] -= self.bits[variable]
            for one in changed(group, self.join(group)):
                latest[one] = key(one)
                heapq.heappush(heap, (latest[one], one))
        return [variable for variable, *_ in tables], tables


def elimination_order(
    sizes: Sequence[int], scopes: Sequence[tuple[int, ...]], without: tuple[int, ...] = ()
) -> tuple[list[int], list[tuple[int, ...]]]:
    """A greedy order in which to eliminate, and the variables of each table it makes.

    The next variable is the one whose elimination makes the smallest table (product of the
    domains of it and its neighbours; the lower index of equals). Those in `without` take no part.
    The weights are kept up to date edge by edge, so that a variable with thousands of neighbours
    costs no more than another.
    """
    joins = _Joins(sizes, scopes, without)
    return joins.order(joins.weight.__getitem__, lambda group, _: group)


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


class Buckets:
    """A pass over variables in an order: of each, the factors of which it is the first. cost: the
    least of all; work: the entries computed; width: the most variables of a table."""

    def __init__(self, factors: Iterable[Factor], order: Sequence[int]) -> None:
        self.width = self.work = 0
        self.cost = 0.0
        self._position = {variable: i for i, variable in enumerate(order)}
        self._waiting: list[list[Factor]] = [[] for _ in order]
        for factor in factors:
            self.place(factor)

    def place(self, factor: Factor) -> None:
        """Put a factor, or what is left of a bucket, where its first variable is."""
        if factor.scope:
            self._waiting[self.bucket(factor)].append(factor)
        else:
            self.cost += float(factor.table)

    def bucket(self, factor: Factor) -> int:
        """Of which bucket a factor is: its first variable's; after all, that of none."""
        return min((self._position[v] for v in factor.scope), default=len(self._position))

    def filled(self) -> list[tuple[int, list[Factor]]]:
        """The buckets in order; those to come fill while this one is emptied."""
        return list(zip(self._position, self._waiting))

    def assignment(self) -> dict[int, int]:
        """A value for every variable, last eliminated first: of least cost to its bucket."""
        chosen: dict[int, int] = {}
        for variable, bucket in reversed(self.filled()):
            if bucket:
                cost = sum(
                    f.table[
                        tuple(slice(None) if v == variable else chosen.get(v, 0) for v in f.scope)
                    ]
                    for f in bucket
                )
                chosen[variable] = int(np.argmin(cost))
        return chosen


class Elimination(Buckets):
    """A pass of bucket elimination. repeated: what is known from buckets before."""

    def __init__(
        self, factors: list[Factor], order: list[int], repeated: Repeated | None = None
    ) -> None:
        super().__init__(factors, order)
        repeated = repeated or Repeated()
        self.conflict: tuple[int, ...] = ()
        for variable, bucket in self.filled():
            if not bucket:
                continue
            message, entries = minimise(variable, bucket, repeated)
            self.width = max(self.width, len(message.scope) + 1)
            self.work += entries
            if not self.conflict and np.isinf(message.table).all():
                self.conflict = (variable, *message.scope)
                self.cost = math.inf
                return
            self.place(message)


def minimise(variable: int, bucket: list[Factor], repeated: Repeated) -> tuple[Factor, int]:
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

    A wide sum, which is of two at least as each variable has costs of its own, is made for one
    value of that at a time: what numpy adds keeps the layout of the tables, in which that axis may
    be the innermost, and a minimum over such a one is slow.
    """
    size, *rest = np.broadcast_shapes(*(t.shape for t in tables))
    if math.prod(rest) < _WIDE:
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
    return [
        f
        if fixed.keys().isdisjoint(f.scope)  # its table stays one array: see `Repeated`
        else Factor(
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
    joins = _Joins(sizes, scopes, without)
    near, bits = joins.near, joins.bits

    def key(variable: int) -> tuple[int, int]:
        own = near[variable]
        # of a neighbour, those that it is not joined to yet: few are looked at, even of a hub's
        fill = sum(bits[a] * (len(own) - 1 - len(own & near[a])) for a in own)
        return fill, joins.weight[variable]

    def changed(group: list[int], pairs: list[tuple[int, int]]) -> Iterable[int]:
        """What has a new neighbour, or a new join of two of its neighbours."""
        return set(group).union(*(near[a] & near[b] for a, b in pairs))

    return joins.order(key, changed)
