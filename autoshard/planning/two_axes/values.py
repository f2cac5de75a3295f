"""One value in pairs of states: what it costs to move it on each of two axes.

A rank holds a value in its own state on the outer axis, and in each other one that a reader wants.
What makes those is one operator each, a change of state over the outer axis, which passes the
states of the inner axis that its rule offers (rules/outer_axis.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import fx

from autoshard.planning import cost
from autoshard.planning.prices import MovedValue
from autoshard.planning.problem import Builder
from autoshard.planning.strategy import Strategy, value
from autoshard.planning.values import shardable, tensor_bytes
from autoshard.runtime.collectives import I, R, State, forward_value

StatePair = tuple[State, State]
"""The states of a value on the outer and on the inner axis."""


class Parts(Protocol):
    """Makes single nodes of the graph of a rank of the outer axis (building/first_axis.py)."""

    operand_of: dict[fx.Node, fx.Node]

    def operator(self, node: fx.Node, strategy: Strategy) -> fx.Node: ...

    def change(self, source: fx.Node, have: State, want: State) -> fx.Node: ...

    def tensor(self, val: torch.Tensor, state: State) -> torch.Tensor: ...


class Passed(NamedTuple):
    """A change of state over the outer axis, where the inner state is `state`."""

    state: State
    seconds: float


class HeldValue:
    """The prices of the value of `source`, and of every other of the same shape and use."""

    def __init__(
        self,
        source: fx.Node,
        outer: Builder,
        inner: Builder,
        parts: Parts,
        offers: Callable[[fx.Node, fx.Node], tuple[list[Strategy], Sequence[float]]],
    ) -> None:
        self.source, self.outer, self.inner, self.parts, self.offers = (
            *(source, outer, inner, parts, offers),
        )
        self.price = outer.prices.change_cost(source)
        self._whole, self._diff = inner.prices.moved(source), outer.prices.moved(source).diff
        self._moved: dict[tuple[State, bool], MovedValue] = {}
        self._passed: dict[StatePair, list[Passed]] = {}

    def same(self, a: State, b: State) -> bool:
        """Whether a rank holds one value in both outer states."""
        return a == b or (not self._diff and forward_value(a) == forward_value(b))

    def shares(self, own: State) -> list[State]:
        """The inner states that a copy of the value in the outer state `own` may have."""
        return [I, R, *shardable(self._tensor(own), self.inner.n)]

    def inside(self, held: State, a: State, b: State, own: bool = True) -> float:
        """Seconds of a change over the inner axis of what is held in the outer state `held`. own:
        whether it is the operator's result, not what a change over the outer axis made."""
        if (held, own) not in self._moved:
            tensor, whole = self._tensor(held), self._whole
            self._moved[held, own] = MovedValue(
                tensor_bytes(tensor),
                whole.diff,
                whole.activation or (not own and whole.diff),
                cost.outer_dim(tensor.shape),
                whole.last,
            )
        return self.inner.prices.change(a, b, self._moved[held, own])

    def passed(self, src: State, dst: State) -> list[Passed]:
        """The inner states that a change over the outer axis passes, with its seconds in each."""
        if (src, dst) not in self._passed:
            node = self.parts.change(self.source, src, dst)
            domain, costs = self.offers(node, self.source)
            self._passed[src, dst] = [
                Passed(one.output, float(c))  # type: ignore[arg-type]
                for one, c in zip(domain, costs)
            ]
        return self._passed[src, dst]

    def least(
        self,
        held: State,
        want: StatePair,
        inner: Sequence[State],
        own: bool = True,
        readers: int = 1,
    ) -> float:
        """Least seconds to read in `want` what is held in the outer state `held`, and inside in any
        of `inner`, through a change over the outer axis of which this reader pays one of `readers`
        parts."""
        return min(
            (min(self.inside(held, a, t, own) for a in inner) + seconds) / readers
            + self.inside(want[0], t, want[1], own=False)
            for t, seconds in self.passed(held, want[0])
        )

    def _tensor(self, held: State) -> torch.Tensor:
        return self.parts.tensor(value(self.source), held)
