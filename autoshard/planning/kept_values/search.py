"""The prices at which placements and what is kept are decided together: bisections."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import TypeVar

from torch import fx

from autoshard.planning.cost import Cluster
from autoshard.planning.decisions import Decisions
from autoshard.planning.estimate import SLOWS, Training, Walk, values_of
from autoshard.planning.kept_values.bound import HIGHEST, LOWEST, Dual, Problems, segments_by_node
from autoshard.planning.kept_values.problem import KeptValues, Known
from autoshard.planning.prices import AxisPrices, Prices
from autoshard.planning.problem import Problem
from autoshard.planning.solver import Solution, TooWide
from autoshard.planning.strategy import Strategy

_TRIES = 6
_DEAR = 1e-9
"""Above this price what passes through memory is charged it too: the peak has some of that."""

Priced = TypeVar("Priced")


class KeptBefore:
    """What all searches with one plan without a budget know of it, whatever the layout.

    segments: by node. regions: whether the user's are computed again. known: operators under
    strategies, added to.
    """

    def __init__(self, gm: fx.GraphModule, default: Decisions, n: int, cluster: Cluster) -> None:
        values = values_of(gm, default, n, cluster, Training())
        self.segments = segments_by_node(values)
        self.regions = any(one.again >= 0 for one in values)
        self.known: dict[tuple[fx.Node, Strategy], Known] = {}


class KeptSearch:
    """A bisection over the price of a byte; the solution at each price is exact. With a host there
    is one where nothing goes there, and one where all of the way there is hidden.

    default: the plan without a budget, whose values give the segments. shard: ranks among which
    training states are split besides. host: whether values may wait on the host. before: what other
    searches with the same plan know.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        default: Decisions,
        n: int,
        cluster: Cluster,
        shard: int,
        host: bool = False,
        before: KeptBefore | None = None,
    ) -> None:
        self.gm, self.default, self.n, self.cluster, self.shard = gm, default, n, cluster, shard
        self.before = before or KeptBefore(gm, default, n, cluster)
        self.charges = (math.inf, SLOWS) if host else (math.inf,)
        self.price, self.charge, self.kept = 0.0, math.inf, 0.0
        self.refused = ""
        """Why placements were planned by themselves; empty where they were not."""
        if self.before.regions:
            self.refused = "your regions of activation checkpointing are computed again"

    @property
    def allowed(self) -> bool:
        """Whether the search is made."""
        return not self.refused

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
        known: dict[str, tuple[Priced, float]] = {}
        try:
            for charge in self.charges if self.allowed else ():
                self.charge = charge
                low, high = math.log(LOWEST), math.log(HIGHEST)
                for _ in range(_TRIES):
                    self.price = math.exp((low + high) / 2)
                    decisions = plan(self._prices())
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
        except TooWide:  # the placements that were planned by themselves are left
            self.refused = "the graph is too entangled"

    def solved(self, prices: AxisPrices, problem: Problem) -> tuple[Solution, list[fx.Node]]:
        """The cheapest of all placements with all that may be kept, and no held nodes. Raises
        TooWide."""
        decisions = replace(self.default, strategies=dict(self.default.strategies), prices=prices)
        walk = Walk(self.gm, decisions, self.n, self.cluster, Training())
        of = (self.before.segments, self.price, self.charge, self.before.known)
        joint = KeptValues(walk, problem, *of)
        solution, self.kept = joint.solve()
        return solution, []

    def tell(self, plans: Iterable[Decisions], problem: Problems) -> None:
        """Let plans know what is known of others. problem: the planner's at given prices."""
        own = self.default.prices
        prices = Prices(own.parameter_byte, own.activation_byte, spreads_batch=own.spreads_batch)
        dual = Dual(
            gm=self.gm,
            n=self.n,
            cluster=self.cluster,
            shard=self.shard,
            host=math.isfinite(self.charges[-1]),
            prices=prices,
            problem=problem,
        )
        for plan in plans:
            plan.placements, plan.apart = (None if self.refused else dual), self.refused

    def _prices(self) -> Prices:
        own = self.default.prices
        passing = self.price if self.price > _DEAR else own.activation_byte
        dearer = own.parameter_byte + self.price / self.shard
        return Prices(dearer, passing, spreads_batch=own.spreads_batch)
