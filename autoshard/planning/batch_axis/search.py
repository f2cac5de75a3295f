"""Which charge for a second of data-parallel communication, and which price of a byte, make the
quickest step.

Gathers and reductions of weights run beside the compute, and only what outlasts it is waited for:
whether a second of them costs a second or next to nothing is a property of the whole step, not of
one weight. So the problem is solved for both, exactly each time, and the estimate of the step,
which knows what overlaps, decides between the plans (as with transfers to the host).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol, TypeVar

from torch import fx

from autoshard.planning.decisions import Decisions
from autoshard.planning.prices import Prices
from autoshard.runtime.collectives import ONCE, TWICE

_CHEAPER = 4
"""Prices of a byte below the default at which plans are tried where memory is left."""
_LEAST_PRICE = 1e-13


class Estimated(Protocol):
    """A plan with what the estimate says of it."""

    @property
    def decisions(self) -> Decisions: ...

    @property
    def seconds(self) -> float:
        """Of a step."""

    @property
    def held(self) -> int:
        """Bytes of a rank that its weights take, gathered ones among them."""

    @property
    def fits(self) -> bool:
        """Whether it fits as it is."""


One = TypeVar("One", bound=Estimated)


def least_charged(
    solve: Callable[[Prices], Decisions],
    estimate: Callable[[Decisions], Estimated],
    prices: Prices,
    overlap: float,
) -> Decisions:
    """The plan whose step and bytes, at the planner's price, are estimated to cost least: of that
    which charges data-parallel communication whole, and that which charges what it takes of the
    compute that hides it."""
    seen = solve(prices)
    hidden = solve(replace(prices, batch_second=1 - overlap))
    if _same(seen, hidden):
        return seen
    hidden = replace(hidden, charged=seen.seconds)
    price = seen.prices.parameter_byte
    both = [estimate(one) for one in (seen, hidden)]
    return min(both, key=lambda one: one.seconds + price * one.held).decisions


def within_room(
    solve: Callable[[Prices], Decisions],
    estimate: Callable[[Decisions], One],
    default: One,
    prices: Prices,
    used: Sequence[fx.Node],
) -> One:
    """The quickest plan that fits, where the default one does: at cheaper bytes, and with
    weights kept that would be gathered again, those first that the forward reads last.

    used: the parameters in the order of their first use.
    """
    best, before = default, [default.decisions]
    high = default.decisions.prices.parameter_byte
    for step in range(1, _CHEAPER + 1):
        price = high * (_LEAST_PRICE / high) ** (step / _CHEAPER)
        made = solve(replace(prices, parameter_byte=price))
        made = replace(made, charged=default.decisions.compared)
        if any(_same(made, one) for one in before):
            continue
        before.append(made)
        one = estimate(made)
        if one.fits and one.seconds < best.seconds:
            best = one
    return _filled(best, estimate, used)


def _filled(best: One, estimate: Callable[[Decisions], One], used: Sequence[fx.Node]) -> One:
    """With as many weights gathered once instead of twice as fit: all have one ratio of
    seconds to bytes, so that a price takes all of them or none."""
    weights = best.decisions.weights
    twice = [node for node in reversed(used) if weights.get(node) == TWICE]
    low, high, found = 0, len(twice), best  # so many fit; more than so many do not
    while low < high:
        count = (low + high + 1) // 2
        kept = dict.fromkeys(twice[:count], ONCE)
        one = estimate(replace(best.decisions, weights={**weights, **kept}))
        if not one.fits:
            high = count - 1
            continue
        low = count
        if one.seconds < found.seconds:
            found = one
    return found


def _same(one: Decisions, other: Decisions) -> bool:
    return one.weights == other.weights and one.strategies == other.strategies
