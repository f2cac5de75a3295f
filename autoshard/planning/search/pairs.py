"""One value in pairs of states: what it costs to move it on each of two axes, and its factors.

A rank holds a value in its own state on the outer axis, and in each other one that a reader wants.
What makes those is one operator each, a change of state over the outer axis, which passes the
states of the inner axis that its rule offers (rules/outer_axis.py).

A value with several readers may be held in three ways: as it is made; in another inner state (the
inner copy); in one other outer state (the outer copy), made by one change of state for all readers
that want it. What a reader wants in a third outer state is charged to it as one of as many parts as
could share that, so that the sum is never more than what the plan costs.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import fx

from autoshard.planning import cost
from autoshard.planning.cost import tensor_bytes
from autoshard.planning.prices import MovedValue
from autoshard.planning.problem import Builder
from autoshard.planning.strategy import Strategy, value
from autoshard.planning.values import shardable
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


@dataclass(eq=False)
class HeldValue:
    """The prices of the value of `source`, and of every other of the same shape and use."""

    source: fx.Node
    outer: Builder
    inner: Builder
    parts: Parts
    offers: Callable[[fx.Node, fx.Node], tuple[list[Strategy], Sequence[float]]]

    def __post_init__(self) -> None:
        self.price = self.outer.prices.change_cost(self.source)
        self._whole = self.inner.prices.moved(self.source)
        self._diff = self.outer.prices.moved(self.source).diff
        self._moved: dict[tuple[State, bool], tuple[MovedValue, dict[StatePair, float]]] = {}
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
            moved = MovedValue(
                tensor_bytes(tensor),
                whole.diff,
                whole.activation or (not own and whole.diff),
                cost.outer_dim(tensor.shape),
                whole.last,
            )
            self._moved[held, own] = moved, {}
        moved, known = self._moved[held, own]
        if (a, b) not in known:
            known[a, b] = self.inner.prices.change(a, b, moved)
        return known[a, b]

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

    def read(
        self,
        have: Sequence[StatePair],
        want: Sequence[StatePair],
        own: bool = True,
        readers: int = 1,
    ) -> np.ndarray:
        """[have, want]: least seconds to read what is held in one pair as another; where the outer
        states differ, through a change over the outer axis of which this reader pays one of
        `readers` parts. own: as of `inside`."""
        found = np.empty((len(have), len(want)))
        for (held, rows), (outer, columns) in itertools.product(_by_outer(have), _by_outer(want)):
            inner, wanted = [have[i][1] for i in rows], [want[i][1] for i in columns]
            if self.same(held, outer):
                block = self._changes(held, inner, wanted, own)
            else:
                passed = self.passed(held, outer)
                states = [one.state for one in passed]
                seconds = np.array([one.seconds for one in passed])
                before = self._changes(held, inner, states, own)
                after = self._changes(outer, states, wanted, False)
                through = ((before + seconds) / readers)[:, :, None] + after[None]
                block = through.min(axis=1)
            found[np.ix_(rows, columns)] = block
        return found

    def _changes(
        self, held: State, have: Sequence[State], want: Sequence[State], own: bool
    ) -> np.ndarray:
        return np.array([[self.inside(held, a, b, own) for b in want] for a in have])

    def _tensor(self, held: State) -> torch.Tensor:
        return self.parts.tensor(value(self.source), held)


class Produced(NamedTuple):
    """What a strategy of the producer makes. shares: the inner states its copy may have."""

    outer: State
    inner: State
    shares: tuple[State, ...]


OuterCopy = StatePair | None
"""The pair of states of the outer copy; None where there is none."""


class ValueTables:
    """The tables of one kind of value, made once.

    planned: whether the outer plan knows of copies, and routes readers through them where that is
    cheaper. readers: how many there are.
    """

    def __init__(self, held: HeldValue, planned: bool, readers: int) -> None:
        self.held, self.planned, self.share = held, planned, max(1, readers - 1)
        self._all: dict[tuple[Any, ...], np.ndarray] = {}

    def direct(self, made: Sequence[Produced], wanted: Sequence[StatePair]) -> np.ndarray:
        """Of a value with one reader: [made, wanted]."""

        return self._spread(("direct",), _pairs(made), tuple(wanted), self.held.read)

    def inner_copy(self, made: Sequence[Produced], copies: Sequence[State]) -> np.ndarray:
        """[made, inner copy]."""

        def cell(one: Produced, copy: State) -> float:
            possible = copy in one.shares
            return self.held.inside(one.outer, one.inner, copy) if possible else np.inf

        key = ("inner", tuple(made), tuple(copies))
        if key not in self._all:
            self._all[key] = _array(cell, made, copies)
        return self._all[key]

    def outer_copy(
        self, made: Sequence[Produced], copies: Sequence[State], outer: Sequence[OuterCopy]
    ) -> np.ndarray:
        """[made, inner copy, outer copy]; without inner copies, [made, outer copy]."""
        held = self.held

        def cell(have: StatePair, also: OuterCopy) -> float:
            if also is None:
                return 0.0
            if held.same(have[0], also[0]):
                return np.inf
            passed = dict(held.passed(have[0], also[0]))
            if also[1] not in passed:
                return np.inf
            return passed[also[1]] + held.inside(have[0], have[1], also[1])

        key = ("outer", _pairs(made), tuple(copies), tuple(outer))
        if key not in self._all:
            have = list(dict.fromkeys(key[1]))
            table = _array(cell, have, outer)
            if copies:
                own = list(dict.fromkeys(h for h, _ in have))
                rows = [own.index(h) for h, _ in have]
                inner = [_array(cell, [(h, k) for h in own], outer)[rows] for k in copies]
                table = np.minimum(table[:, None], np.stack(inner, 1))
            self._all[key] = np.ascontiguousarray(table[[have.index(one) for one in key[1]]])
        return self._all[key]

    def reader(
        self,
        made: Sequence[Produced],
        wanted: Sequence[StatePair],
        copies: Sequence[State],
        outer: Sequence[OuterCopy],
    ) -> np.ndarray:
        """[made, wanted, inner copy, outer copy]; without inner copies, that place is left out."""
        held, share = self.held, self.share

        def by_copy(have: State, want: State, also: State) -> bool:
            if held.same(have, want):
                return False
            nearer = self.planned and held.price(also, want) < held.price(have, want)
            return held.same(also, want) or nearer

        def routes(have: list[StatePair], want: list[StatePair]) -> np.ndarray:
            groups = [_by_outer(have), _by_outer(want), _by_outer([c or (I, I) for c in outer])]
            found = np.empty((len(have), len(want), len(outer)), dtype=bool)
            for (h, rows), (w, columns), (c, copied) in itertools.product(*groups):
                found[np.ix_(rows, columns, copied)] = by_copy(h, w, c)
            found[:, :, [i for i, c in enumerate(outer) if c is None]] = False
            return found

        def table(have: list[StatePair], want: list[StatePair]) -> np.ndarray:
            from_own = held.read(have, want, True, share)
            through = np.full((len(outer), len(want)), np.inf)
            some = [i for i, c in enumerate(outer) if c is not None]
            through[some] = held.read([c for c in outer if c is not None], want, False, share)
            through = through.T[None]
            route = routes(have, want)
            if not copies:
                return np.where(route, through, from_own[:, :, None])
            own = list(dict.fromkeys(h for h, _ in have))
            rows = [own.index(h) for h, _ in have]
            each = [held.read([(h, k) for h in own], want, True, share)[rows] for k in copies]
            least = np.minimum(from_own[:, :, None], np.stack(each, 2))
            return np.where(route[:, :, None, :], through[:, :, None, :], least[..., None])

        key = ("reader", tuple(copies), tuple(outer))
        return self._spread(key, _pairs(made), tuple(wanted), table)

    def _spread(
        self,
        key: tuple[Any, ...],
        made: tuple[StatePair, ...],
        wanted: tuple[StatePair, ...],
        table: Callable[[list[StatePair], list[StatePair]], np.ndarray],
    ) -> np.ndarray:
        """A table of distinct pairs, by those of every strategy."""
        whole = (*key, made, wanted)
        if whole not in self._all:
            have, want = list(dict.fromkeys(made)), list(dict.fromkeys(wanted))
            rows, columns = [have.index(one) for one in made], [want.index(one) for one in wanted]
            self._all[whole] = np.ascontiguousarray(table(have, want)[rows][:, columns])
        return self._all[whole]


def _by_outer(pairs: Sequence[StatePair]) -> list[tuple[State, list[int]]]:
    """The places of the pairs with each outer state."""
    found: dict[State, list[int]] = {}
    for i, (outer, _) in enumerate(pairs):
        found.setdefault(outer, []).append(i)
    return list(found.items())


def _pairs(made: Sequence[Produced]) -> tuple[StatePair, ...]:
    return tuple((one.outer, one.inner) for one in made)


def _array(cell: Callable[[Any, Any], float], rows: Sequence[Any], columns: Sequence[Any]) -> Any:
    return np.array([[cell(a, b) for b in columns] for a in rows], dtype=float)
