"""The prices at which placements and what is kept are decided together: a bisection."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TypeVar

from torch import fx

from autoshard.planning.cost import Cluster
from autoshard.planning.decisions import Decisions
from autoshard.planning.estimate import Training, Walk, segments_of, values_of
from autoshard.planning.kept_values.problem import KeptValues
from autoshard.planning.prices import AxisPrices, Prices
from autoshard.planning.problem import Problem
from autoshard.planning.solver import Solution, TooWide

_LOWEST, _HIGHEST = 1e-14, 1e-6
"""Seconds a kept byte: at the lowest a gigabyte costs ten microseconds, at the highest 1000 s."""
_TRIES = 6
_DEAR = 1e-9
"""Above this price what passes through memory is charged it too: the peak has some of that."""

Priced = TypeVar("Priced")


class KeptSearch:
    """A bisection over the price of a byte; the solution at each price is exact.

    default: the plan without a budget, whose values give the segments. shard: ranks among which
    training states are split besides.
    """

    def __init__(
        self, gm: fx.GraphModule, default: Decisions, n: int, cluster: Cluster, shard: int
    ) -> None:
        self.gm, self.default, self.n, self.cluster, self.shard = gm, default, n, cluster, shard
        values = values_of(gm, default, n, cluster, Training())
        self.segments: dict[fx.Node, int] = {}
        for one, segment in zip(values, segments_of(values)):
            self.segments.setdefault(one.key[0], segment)
        self.price, self.kept = 0.0, 0.0
        self.allowed = all(one.again < 0 for one in values)
        """Whether the search is made: regions of the user's are decided on the placed graph."""

    def run(
        self,
        plan: Callable[[Prices], Decisions],
        price: Callable[[Decisions], Priced],
        fits: Callable[[Priced], bool],
    ) -> Iterator[Priced]:
        """The distinct plans that are found, priced.

        plan: makes one at given prices, by way of `solved`. price: decides what the placed graph
        computes again. Bytes become dearer where that does not fit, or may keep less than the
        solution does.
        """
        low, high = math.log(_LOWEST), math.log(_HIGHEST)
        known: dict[str, tuple[Priced, float]] = {}
        for _ in range(_TRIES if self.allowed else 0):
            self.price = math.exp((low + high) / 2)
            try:
                decisions = plan(self._prices())
            except TooWide:
                return  # the placements that were planned by themselves are left
            key = f"{decisions.graph_plan()} {list(decisions.stored.values())}"
            if key not in known:
                priced, chosen = price(decisions), decisions.recomputation
                known[key] = priced, math.inf if chosen is None else chosen.kept
                yield priced
            priced, most = known[key]
            if fits(priced) and self.kept <= most:
                high = math.log(self.price)
            else:
                low = math.log(self.price)

    def solved(self, prices: AxisPrices, problem: Problem) -> tuple[Solution, list[fx.Node]]:
        """The cheapest of all placements with all that may be kept, and no held nodes. Raises
        TooWide."""
        decisions = replace(self.default, strategies=dict(self.default.strategies), prices=prices)
        walk = Walk(self.gm, decisions, self.n, self.cluster, Training())
        solution, self.kept = KeptValues(walk, problem, self.segments, self.price).solve()
        return solution, []

    def _prices(self) -> Prices:
        own = self.default.prices
        passing = self.price if self.price > _DEAR else own.activation_byte
        dearer = own.parameter_byte + self.price / self.shard
        return Prices(dearer, passing, spreads_batch=own.spreads_batch)
