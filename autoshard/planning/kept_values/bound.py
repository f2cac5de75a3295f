"""By how much other placements may be quicker under a budget: the Lagrangian dual.

At a price of a byte, no placement with any choice of what is kept is charged less than the joint
problem's least. One that needs no more bytes than a plan is charged no more for them than the plan.
So it is quicker by at most what the plan is charged above that least, at any price; the price of
the smallest such difference is found by bisection.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import fx

from autoshard.planning.cost import Cluster
from autoshard.planning.decisions import Decisions
from autoshard.planning.estimate import (
    SLOWS,
    RankValue,
    Training,
    Walk,
    merged,
    segments_of,
    values_of,
)
from autoshard.planning.kept_values.charges import charged
from autoshard.planning.kept_values.held_weights import held_weights
from autoshard.planning.kept_values.problem import KeptValues
from autoshard.planning.prices import AxisPrices, Prices
from autoshard.planning.problem import Problem
from autoshard.planning.solver import TooWide

LOWEST, HIGHEST = 1e-14, 1e-6
"""Seconds a kept byte: at the lowest a gigabyte costs ten microseconds, at the highest 1000 s."""
_TRIES = 7
_ROUNDING = 1e-9
"""Sums in two orders may differ by such a part."""

Problems = Callable[[Prices], tuple[Problem, AxisPrices]]
"""The planner's problem, and its prices, at given prices of bytes."""


@dataclass(frozen=True, kw_only=True)
class Dual:
    """The dual of a budget on one graph.

    prices: of the planner without a budget. shard: ranks among which training states are split
    besides; 1 where the planner charges the bytes of a rank, as for choices on dp_shard. host:
    whether values may wait on the host. problem: the planner's at given prices.
    """

    gm: fx.GraphModule
    n: int
    cluster: Cluster
    shard: int
    host: bool
    prices: Prices
    problem: Problems

    def gap(self, plan: Decisions) -> float | None:
        """The seconds, as the planner charges them, by which a placement with any choice may be
        quicker that holds no more weights, passes no more through memory and keeps no more
        activations than `plan` with its own. Its choices are those in the plan's segments, and what
        goes to the host is not waited for. None: not known."""
        chosen, own = plan.recomputation, charged(*self.problem(self.prices), plan)
        if chosen is None or own is None or self.prices.parameter_byte is None:
            return None
        most = own.held / self.shard + chosen.kept
        values = values_of(self.gm, plan, self.n, self.cluster, Training())
        segments = segments_by_node(values, chosen.length)
        least, low, high = math.inf, math.log(LOWEST), math.log(HIGHEST)
        for _ in range(_TRIES):
            if least <= _ROUNDING * own.seconds:
                return 0.0
            price = math.exp((low + high) / 2)
            try:
                found, needs = self.least(plan, segments, price)
            except TooWide:
                return None
            least = min(least, own.seconds + chosen.seconds + price * most - found)
            if needs > most:
                low = math.log(price)
            else:
                high = math.log(price)
        return max(0.0, least)

    def least(
        self, plan: Decisions, segments: dict[fx.Node, int], price: float
    ) -> tuple[float, float]:
        """The least that any placement is charged with any choice at a price of a byte, and about
        how many bytes that one needs."""
        assert self.prices.parameter_byte is not None
        dearer = self.prices.parameter_byte + price / self.shard
        problem, prices = self.problem(replace(self.prices, parameter_byte=dearer))
        decisions = replace(plan, strategies=dict(plan.strategies), prices=prices)
        walk = Walk(self.gm, decisions, self.n, self.cluster, Training())
        charge = SLOWS if self.host else math.inf
        solution, kept = KeptValues(walk, problem, segments, price, charge).solve()
        held = sum(one.held for one in held_weights(problem, prices, problem.read(solution)[0]))
        return solution.cost, kept + held / self.shard


def segments_by_node(values: Sequence[RankValue], length: int = 1) -> dict[fx.Node, int]:
    """The segment of what each node makes, `length` neighbours joined to one."""
    segments: dict[fx.Node, int] = {}
    for one, segment in zip(values, merged(segments_of(values), length)):
        segments.setdefault(one.key[0], segment)
    return segments
