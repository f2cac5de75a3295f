"""Exact minimisation of a sum of small tables: bucket elimination on a factor graph.

The problem: variables with finite domains, and factors, each a table of costs over one or a few
variables; find the assignment of least total cost. The algorithm is bucket elimination (I.
Dechter, "Bucket elimination: a unifying framework for reasoning", Artificial Intelligence 113,
1999): take one variable, add up every table it appears in, minimise over it, and put what is
left back as a new table over its neighbours. Work is the sum of the tables' sizes, so it is
linear in the length of a graph whose width (the most variables in one table) does not grow.

Nothing here knows about tensors. Every choice is ordered by variable index, so the same graph
gives the same assignment in every process.
"""

import itertools
import math
import string
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autoshard.planning.solver.elimination import (
    Elimination,
    Factor,
    Repeated,
    Table,
    condition,
    elimination_order,
)
from autoshard.planning.solver.mini_buckets import MiniBuckets, refined
from autoshard.runtime.errors import PlanError

_PARTS = (2**14, 2**17, 2**20, 2**22)
"""The most entries of a mini-bucket, tried one after another."""
_MOST_IN_PARTS = 2**28
"""The most entries that a pass of mini-buckets may have, as a rule."""
_ROUNDING = 1e-12
"""Sums in two orders may differ by such a part."""


class Infeasible(PlanError):
    """Every assignment costs infinity."""


class TooWide(PlanError):
    """The exact minimum would take more work than allowed."""


@dataclass(frozen=True)
class Solution:
    """The least-cost assignment.

    assignment: the chosen value of each variable, by the variable's index.
    cost: the sum of all costs at that assignment.
    width: the most variables that one table joined (treewidth of the order used, plus one).
    work: table entries computed; grows linearly with the length of a graph of bounded width.
    gap: by how much a cheaper assignment may be cheaper; 0 of the minimum.
    """

    assignment: list[int]
    cost: float
    width: int
    work: int
    gap: float = 0.0


class FactorGraph:
    """Variables and factors; `solve` finds the exact minimum.

    table_limit: the most entries of one table; above it the solver branches over variables.
    work_limit: the most entries in all, above which it raises TooWide. order: how the order of
    elimination is found, `elimination_order` or `fill_order`.
    """

    def __init__(
        self,
        table_limit: int = 2**26,
        work_limit: int = 2**27,
        order: Callable[..., tuple[list[int], list[tuple[int, ...]]]] = elimination_order,
    ) -> None:
        self._order = order
        self._table_limit = table_limit
        self._work_limit = work_limit
        self._sizes: list[int] = []
        self._unary: list[Table] = []
        self._names: list[str] = []
        self._tables: dict[tuple[int, ...], Table] = {}
        self._labels: dict[tuple[int, ...], str] = {}
        self._added: dict[tuple[int, str], tuple[object, Table]] = {}
        self._repeated = Repeated()

    def variable(
        self, size: int, cost: NDArray[np.floating] | None = None, name: str | None = None
    ) -> int:
        """Add a variable with values 0..size-1 and, optionally, a cost for each; its index."""
        index = len(self._sizes)
        name = f"variable {index}" if name is None else name
        if size < 1:
            raise ValueError(f"{name} has no values (size {size})")
        self._sizes.append(size)
        self._names.append(name)
        self._unary.append(_checked(np.zeros(size) if cost is None else cost, (size,), name))
        return index

    @property
    def unary(self) -> tuple[Table, ...]:
        """The cost of each value of each variable."""
        return tuple(self._unary)

    @property
    def tables(self) -> Mapping[tuple[int, ...], Table]:
        """The sum of the tables over each scope, ascending; equal ones are often one array."""
        return self._tables

    def add(
        self, variables: tuple[int, ...], table: NDArray[np.floating], name: str | None = None
    ) -> None:
        """Add `table[value of variables[0], value of variables[1], ...]`; np.inf forbids.

        Tables over the same variables are summed; a variable may appear twice.
        """
        if not variables:
            raise ValueError("a factor needs at least one variable")
        label = name or "factor over " + ", ".join(self._names[v] for v in variables)
        scope = tuple(sorted(set(variables)))
        # einsum does both: axes in ascending order, and the diagonal of a repeated variable.
        letters = {v: string.ascii_letters[i] for i, v in enumerate(scope)}
        equation = "".join(letters[v] for v in variables) + "->" + "".join(letters.values())
        key = (id(table), equation)
        if key not in self._added or table.shape != tuple(self._sizes[v] for v in variables):
            checked = _checked(table, tuple(self._sizes[v] for v in variables), label)
            self._added[key] = table, np.ascontiguousarray(np.einsum(equation, checked))
        checked = self._added[key][1]
        self._labels.setdefault(scope, label)
        self._tables[scope] = self._tables[scope] + checked if scope in self._tables else checked

    def solve(self) -> Solution:
        """The assignment of least total cost; of equals, always the same one.

        Raises Infeasible naming the first variable left without a value, TooWide with numbers.
        """
        domains = self._consistent_domains()
        factors = self._factors(domains)
        cutset, order = self._branches(domains, factors)
        best: dict[int, int] = {}
        least = math.inf
        width = work = 0
        for fixed in _assignments(cutset, domains):
            run = Elimination(condition(factors, fixed), order, self._repeated)
            width, work = max(width, run.width + len(fixed)), work + run.work
            if run.cost < least:
                least, best = run.cost, run.assignment() | fixed
        if math.isinf(least):
            raise Infeasible(self._conflict(domains, factors, cutset, order))
        assignment = [int(v[best.get(i, 0)]) for i, v in enumerate(domains)]
        return Solution(assignment, self._cost(assignment), width, work)

    def bounded(self) -> Solution | None:
        """A good assignment, where `solve` raises TooWide, and its gap: 0 where mini-buckets show
        that it is the minimum. None where they find none that is allowed, and with the first value
        that is left of what is in the way, as a rule replicated, there is none either.

        Their tables grow until the gap is closed, or the work would.
        """
        domains = self._consistent_domains()
        factors = self._factors(domains)
        sizes = [len(values) for values in domains]
        order, _ = self._order(sizes, [factor.scope for factor in factors])
        least, bound = math.inf, -math.inf
        best: dict[int, int] = {}
        width = work = 0

        def total(one: dict[int, int]) -> float:
            return math.fsum(f.table[tuple(one.get(v, 0) for v in f.scope)] for f in factors)

        for limit in _PARTS:
            run = MiniBuckets(factors, order, sizes, limit)
            found = [run.assignment()]
            bound, width, work = max(bound, run.cost), max(width, run.width), work + run.work
            last = limit == _PARTS[-1] or 4 * run.work > _MOST_IN_PARTS
            if last and best:
                better, more = refined(factors, sizes, best)
                found, work = [*found, better], work + more
            for one in found:
                if (cost := total(one)) < least:
                    least, best = cost, one
            if least - bound <= _ROUNDING * abs(least) < math.inf:
                bound = least
            if last or bound == least:
                break
        if math.isinf(least):
            best, more = refined(factors, sizes, {})
            least, work = total(best), work + more
        if math.isinf(least):
            return None
        assignment = [int(v[best.get(i, 0)]) for i, v in enumerate(domains)]
        return Solution(assignment, self._cost(assignment), width, work, least - bound)

    def _cost(self, assignment: list[int]) -> float:
        terms = [cost[value] for cost, value in zip(self._unary, assignment, strict=True)]
        for scope, table in self._tables.items():
            terms.append(table[tuple(assignment[v] for v in scope)])
        return math.fsum(terms)

    def _branches(
        self, domains: list[NDArray[np.intp]], factors: list[Factor]
    ) -> tuple[tuple[int, ...], list[int]]:
        """The variables to branch over, and the order in which the others are eliminated."""
        sizes = [len(values) for values in domains]
        scopes = [factor.scope for factor in factors]
        cutset: tuple[int, ...] = ()
        while True:
            order, buckets = self._order(sizes, scopes, without=cutset)
            branches = math.prod(sizes[v] for v in cutset)
            entries = [math.prod(sizes[v] for v in bucket) for bucket in buckets]
            fits = not entries or max(entries) <= self._table_limit
            if fits and branches * sum(entries) <= self._work_limit:
                return cutset, order
            if fits or branches > self._work_limit:
                widest = buckets[entries.index(max(entries))]
                raise TooWide(
                    f"the exact minimum over {len(order)} variables takes {branches:.3g} branches "
                    f"of {sum(entries):.3g} table entries, more than {self._work_limit:.3g}; the "
                    f"largest table joins {len(widest)} variables: "
                    f"{', '.join(f'{self._names[v]} ({sizes[v]} values)' for v in widest[:12])}. "
                    "Offer fewer values for these."
                )
            large = (b for b, size in zip(buckets, entries) if size > self._table_limit)
            count = Counter(v for bucket in large for v in bucket)
            cutset += (max(count, key=lambda v: (count[v], -v)),)

    def _factors(self, domains: list[NDArray[np.intp]]) -> list[Factor]:
        """The factors over values that survive, without variables of one value."""
        factors = []
        cut: dict[tuple[int, bytes], Table] = {}  # equal tables cut alike are one array again
        for scope, table in self._tables.items():
            kept = tuple(v for v in scope if len(domains[v]) > 1)
            if not kept:
                continue
            key = (id(table), b"|".join(domains[v].tobytes() for v in scope))
            if key not in cut:
                whole = all(len(domains[v]) == self._sizes[v] for v in scope)
                reduced = table if whole else table[np.ix_(*(domains[v] for v in scope))]
                cut[key] = reduced.reshape([len(domains[v]) for v in kept])
            factors.append(Factor(kept, cut[key]))
        for variable, values in enumerate(domains):
            if len(values) > 1:
                own = self._repeated.table(self._unary[variable][values])
                factors.append(Factor((variable,), own))
        return factors

    def _consistent_domains(self) -> list[NDArray[np.intp]]:
        """Values of each variable left when those that some table forbids outright are removed."""
        alive = [np.isfinite(cost) for cost in self._unary]
        for variable, mask in enumerate(alive):
            if not mask.any():
                raise Infeasible(f"{self._names[variable]}: every value costs infinity")
        finite: dict[int, NDArray[np.bool_]] = {}
        for table in self._tables.values():
            if id(table) not in finite:
                finite[id(table)] = np.isfinite(table)
        some = {key for key, mask in finite.items() if not mask.all()}
        restrictive = {s: finite[id(t)] for s, t in self._tables.items() if id(t) in some}
        touching: dict[int, list[tuple[int, ...]]] = {}
        for scope in restrictive:
            for variable in scope:
                touching.setdefault(variable, []).append(scope)
        queue = deque(restrictive)
        queued = set(restrictive)
        while queue:
            scope = queue.popleft()
            queued.discard(scope)
            possible = restrictive[scope][np.ix_(*(alive[v] for v in scope))]
            for axis, variable in enumerate(scope):
                others = tuple(i for i in range(len(scope)) if i != axis)
                supported = possible.any(axis=others)
                if supported.all():
                    continue
                if not supported.any():
                    raise Infeasible(
                        f"{self._labels[scope]}: no value of {self._names[variable]} is left "
                        f"({int(alive[variable].sum())} of {self._sizes[variable]} were possible "
                        "before this factor)"
                    )
                alive[variable][np.flatnonzero(alive[variable])[~supported]] = False
                again = [s for s in touching[variable] if s not in queued]
                queue.extend(again)
                queued.update(again)
                break  # `possible` is out of date; this factor is in the queue again
        return [np.flatnonzero(mask) for mask in alive]

    def _conflict(
        self,
        domains: list[NDArray[np.intp]],
        factors: list[Factor],
        cutset: tuple[int, ...],
        order: list[int],
    ) -> str:
        for fixed in _assignments(cutset, domains):
            run = Elimination(condition(factors, fixed), order)
            if run.conflict:
                names = ", ".join(self._names[v] for v in run.conflict)
                return f"no assignment is allowed; the first contradiction is between {names}"
        names = ", ".join(self._names[v] for v in cutset)
        return f"no assignment is allowed; no value of {names} fits the others"


def _assignments(
    cutset: tuple[int, ...], domains: list[NDArray[np.intp]]
) -> Iterator[dict[int, int]]:
    for values in itertools.product(*(range(len(domains[v])) for v in cutset)):
        yield dict(zip(cutset, values, strict=True))


def _checked(table: NDArray[np.floating], shape: tuple[int, ...], name: str) -> NDArray[np.float64]:
    array = np.asarray(table, dtype=np.float64)
    if array.shape != shape:
        raise ValueError(f"{name}: costs have shape {array.shape}, the domains are {shape}")
    if np.isnan(array).any() or np.isneginf(array).any():
        raise ValueError(f"{name}: costs must be numbers or +inf, not NaN or -inf")
    return array
