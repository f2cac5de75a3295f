"""The problem of placements and of what is kept, as one: a variable has a value for each pair of a
strategy (of a copy: a state) and a fate of what it makes.

A value is not there in backward, kept, or computed again. Costs are those of the planner's problem
and, for the graph that those strategies make, those of estimate/recomputation.py: a value that is
kept costs its bytes, at their price, or its way to the host, at the charge for a second of that;
what is computed again costs its seconds, and what it reads must be there. All of that is between a
value and its readers, so the tables have the scopes that they had. A value that one reader alone
moves, without the shared copy, takes the cheapest fate inside of its table.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import fx

from autoshard.planning.estimate import Walk, makes_tensors, takes_no_time
from autoshard.planning.kept_values.fates import (
    AGAIN,
    ANY,
    ANYWHERE,
    KEPT,
    UNREAD,
    PriceChange,
    edge_table,
)
from autoshard.planning.kept_values.readers import ValueReader, edges
from autoshard.planning.mixtures import ROWS
from autoshard.planning.problem import Problem
from autoshard.planning.solver import FactorGraph, Solution, fill_order
from autoshard.planning.strategy import Strategy, operands, value
from autoshard.planning.values import output_state, producer
from autoshard.runtime.collectives import State, forward_value

MOST_ENTRIES = 2**26
MOST_WORK = 2**34
"""Table entries in one, and in all; equal tables, those of equal layers, are computed once."""

_MOST_PLACES = 3
"""Segments of readers, of which a copy knows in which one it is computed again."""


class _SourceTables(NamedTuple):
    """Of a value: what its copy's fates cost, by themselves and with the producer, where there is
    one; and the table of each reader, None where that is all zeros."""

    own: np.ndarray | None
    copy: np.ndarray | None
    readers: list[np.ndarray | None]


class Known(NamedTuple):
    """An operator under a strategy, at any price: bytes that it keeps of its own and those of its
    result, what its derivative reads, and the seconds to run it again."""

    inner: int
    size: int
    needs: list[tuple[fx.Node, State]]
    seconds: float


class KeptValues:
    """The joint problem of a planner's problem at one price of a kept byte.

    walk: prices values of the graph; its decisions' strategies are tried one by one, so it must be
    this object's own. segments: by node, that of its value; a change of state is in the segment of
    its first reader. price: seconds a byte. charge: seconds for one on the way to the host;
    infinite: nothing goes there. known: of the same graph at other prices, and added to.
    """

    def __init__(
        self,
        walk: Walk,
        problem: Problem,
        segments: Mapping[fx.Node, int],
        price: float,
        charge: float = math.inf,
        known: dict[tuple[fx.Node, Strategy], Known] | None = None,
    ) -> None:
        self.walk, self.base, self.segments = walk, problem, segments
        self.price, self.charge = price, charge
        self.known = {} if known is None else known
        self.kernels, self.stored = walk.saving.kernels, walk.decisions.stored
        self.last = max(segments.values(), default=0)
        self.fates: dict[int, tuple[int, ...]] = {}
        self.own: dict[int, np.ndarray] = {}
        """By variable: (bytes that are kept, seconds of what is not) of each pair."""
        self._extra: dict[tuple[int, ...], list[tuple[tuple[int, ...], np.ndarray]]] = {}
        self._edges: dict[Any, np.ndarray] = {}
        self._sources: dict[Any, _SourceTables] = {}
        self._wanted: dict[tuple[int, int], tuple[State, ...]] = {}
        self._needs: dict[fx.Node, list[list[tuple[fx.Node, State]]]] = {}
        self._stay: set[fx.Node] = set()
        """What another segment reads in every placement."""
        self._tell: set[fx.Node] = set()
        """Views that another segment reads: they say whether their base is computed again."""

    def solve(self) -> tuple[Solution, float]:
        """The cheapest of all placements with all fates, as one of the planner's problem, and the
        bytes that it keeps of what operators make and of shared copies. Raises TooWide."""
        self._cross()
        for node, variable in self.base.variables.items():
            self._operator(node, variable)
        for entry in self.base.outputs:
            if entry is not None:
                self.fates[entry[0]] = (UNREAD,)
        self._read()
        graph = self._graph()
        solution = graph.solve()
        at = [i // len(self.fates[v]) for v, i in enumerate(solution.assignment)]
        kept = math.fsum(own[0, solution.assignment[v]] for v, own in self.own.items())
        return replace(solution, assignment=at), kept

    # Variables

    def _cross(self) -> None:
        """Find what another segment reads."""
        places: dict[fx.Node, set[int]] = {}
        for node in self.base.variables:
            for source in operands(node) if self._computes(node) else ():
                places.setdefault(source, set()).add(self.segments[node])
        for source, found in places.items():
            base = self.kernels.base[source]
            own = self.segments.get(base)
            if own is None or found == {own}:
                continue
            if own not in found:
                self._stay.add(base)
            node = source
            while node is not base:
                self._tell.add(node)
                got = node.target is operator.getitem
                node = node.args[0] if got else operands(node)[0]  # type: ignore[assignment]

    def _computes(self, node: fx.Node) -> bool:
        """Whether a node makes a value of its own."""
        return node in self.segments and not self.kernels.is_view(node) and makes_tensors(node)

    def _operator(self, node: fx.Node, variable: int) -> None:
        domain, base = self.base.domains[node], self.kernels.base[node]
        if base.op != "call_function" or not makes_tensors(node):
            self.fates[variable] = (KEPT,)  # there without being kept
        elif self.kernels.is_view(node):
            tells = node in self._tell and base not in self._stay
            self.fates[variable] = ANY if tells else (UNREAD, KEPT)
        else:
            rows = np.array([self._fates_of(node, one) for one in domain])
            stays = (
                self.walk.is_made_once(node)
                or node in self._stay
                or np.isinf(rows[:, AGAIN, 1]).all()
            )
            self.fates[variable] = fates = (UNREAD, KEPT) if stays else ANY
            self.own[variable] = rows[:, : len(fates)].reshape(-1, 2).T

    def _fates_of(self, node: fx.Node, strategy: Strategy) -> list[tuple[float, float]]:
        """(bytes, seconds) of each fate; infinite bytes where the derivative reads the value."""
        if (node, strategy) not in self.known:
            self.known[node, strategy] = self._known_of(node, strategy)
        known = self.known[node, strategy]
        self._needs.setdefault(node, []).append(known.needs)
        needed = any(tensor is node for tensor, _ in known.needs)
        ends = self.segments[node] == self.last
        seconds = self._again(known.seconds, known.size, ends)
        kept, sent = self._kept(node, known.size, ends)
        lost = math.inf if needed else known.inner
        return [(lost, 0.0), (known.inner + kept, sent), (0.0, seconds)]

    def _known_of(self, node: fx.Node, strategy: Strategy) -> Known:
        self.walk.decisions.strategies[node] = strategy
        on_ep, stacks = self.walk.decisions.prices.on_ep, self.base.stacks.get(node, ())
        size = on_ep.size if on_ep is not None and strategy.on_ep == ROWS else 1
        self.walk.times.parts = {stack: size for stack, _ in stacks}
        state = output_state(strategy, None if isinstance(strategy.output, str) else 0)
        return Known(
            inner=self.walk.inner(node, strategy),
            size=self.walk.saving.nbytes(node, state),
            needs=self.walk.needs(node),
            seconds=self.walk.seconds(node, strategy),
        )

    def _again(self, seconds: float, size: int, ends: bool) -> float:
        """Seconds of what is computed again; in the last segment only what takes none may be."""
        return math.inf if ends and not takes_no_time(seconds, size) else seconds

    def _kept(self, source: fx.Node, size: int, ends: bool) -> tuple[float, float]:
        """Where a value is kept: (bytes on the device, seconds of the way to the host)."""
        if ends or math.isinf(self.charge) or not isinstance(value(source), torch.Tensor):
            return size, 0.0
        sent = self.walk.cluster.host_seconds(size) * self.charge
        return (0.0, sent) if sent < size * self.price else (size, 0.0)

    def _is_there(self, source: fx.Node) -> bool:
        """Whether a value is a parameter: the planner prices how it is kept."""
        return source in self.stored or not isinstance(value(source), torch.Tensor)

    # Edges

    def _read(self) -> None:
        readers: dict[fx.Node, list[ValueReader]] = {}
        for node, variable in self.base.variables.items():
            view = self.kernels.is_view(node)
            for position, source in enumerate(operands(node)):
                of = (id(self.base.domains[node]), position)  # equal layers have one domain
                if of not in self._wanted:
                    inputs = tuple(one.inputs[position] for one in self.base.domains[node])
                    self._wanted[of] = inputs
                wanted, needs = self._wanted[of], self._needs.get(node)
                read = tuple(
                    needs is not None and (source, want) in needs[i]
                    for i, want in enumerate(wanted)
                )
                if (view and position == 0) or self._computes(node):
                    place = -1 if view else self.segments[node]
                    readers.setdefault(source, []).append(
                        ValueReader(variable, of, wanted, read, view, place)
                    )
        for source, variable in self.base.copies.items():
            if self._is_there(source) or source not in readers:
                self.fates[variable] = (KEPT,)
        for source, found in readers.items():
            if not self._is_there(source):
                self._edges_of(source, found)

    def _edges_of(self, source: fx.Node, found: list[ValueReader]) -> None:
        owner, index = producer(source)
        x, copy = self.base.variables[owner], self.base.copies.get(source)
        copies = tuple(self.base.copy_domains[source]) if copy is not None else None
        of = [one for one in found if not one.view]
        base = self.kernels.base[source]
        start = self.segments.get(base, min((one.place for one in of), default=0))
        uses = len(found) + sum(one is source for one in self._results)
        moved = self.walk.decisions.prices.moved(source)
        of_value = (moved, tuple(value(source).shape), value(source).dtype)
        key = (
            *(id(self.base.domains[owner]), index, self.fates[x], copies, uses, of_value),
            *((one.alike(start, self.last), self.fates[one.variable]) for one in found),
        )
        again = tuple(sorted({one.place - start for one in of}))
        if len(again) > _MOST_PLACES:
            again = (ANYWHERE,)
        if copy is not None:
            self.fates[copy] = (UNREAD, KEPT, *range(AGAIN, AGAIN + len(again)))
        if key not in self._sources:
            states = tuple(output_state(one, index) for one in self.base.domains[owner])
            given = (source, found, states, self.fates[x], copies, again, start, uses, of_value)
            self._sources[key] = self._tables_of(*given)
        tables = self._sources[key]
        if copy is not None and tables.own is not None and tables.copy is not None:
            self.own[copy] = tables.own
            self._put((x, copy), tables.copy)
        for one, table in zip(found, tables.readers):
            if table is not None:
                self._put((x, one.variable) if copy is None else (x, copy, one.variable), table)

    def _tables_of(
        self,
        source: fx.Node,
        found: list[ValueReader],
        states: tuple[State, ...],
        fates: tuple[int, ...],
        copies: tuple[State, ...] | None,
        again: tuple[int, ...],
        start: int,
        uses: int,
        of_value: object,
    ) -> _SourceTables:
        of = [one for one in found if not one.view]
        tables = _SourceTables(None, None, [])
        if copies is not None:
            first = min((one.place for one in of), default=self.last)
            ends = tuple(start + one == self.last for one in again)
            own = self._own_of_copy(source, copies, first == self.last, len(again))
            key = ("copy", states, fates, copies, again, ends, of_value)
            if key not in self._edges:
                self._edges[key] = self._of_copy(source, states, fates, copies, again, ends)
            tables = _SourceTables(own, self._edges[key], [])
        fates_of = [self.fates[one.variable] for one in found]
        value_of = (states, fates, copies, again)
        for edge in edges(value_of, found, fates_of, start, self.last, uses):
            if (edge, of_value) not in self._edges:
                change = self.walk.decisions.prices.change_cost(source)
                self._edges[edge, of_value] = edge_table(edge, self._changes(source), change)
            table = self._edges[edge, of_value]
            tables.readers.append(table if np.any(table) else None)
        return tables

    @cached_property
    def _results(self) -> list[Any]:
        return list(self.walk.gm.graph.output_node().args[0])  # type: ignore[arg-type]

    def _changes(self, source: fx.Node) -> PriceChange:
        def prices(have: State, want: State, ends: bool) -> tuple[float, float]:
            size = self.walk.saving.nbytes(source, want)
            kept, sent = self._kept(source, size, ends)
            seconds = self.walk.change_seconds(source, have, want)
            return kept * self.price + sent, self._again(seconds, size, ends)

        return prices

    def _own_of_copy(
        self, source: fx.Node, copies: tuple[State, ...], ends: bool, places: int
    ) -> np.ndarray:
        """What a copy's fates cost by themselves. ends: whether its first reader is in the last
        segment."""
        nothing = [(0.0, 0.0)] * places
        rows = [
            [(0.0, 0.0), self._kept(source, self.walk.saving.nbytes(source, state), ends), *nothing]
            for state in copies
        ]
        return np.array(rows).reshape(-1, 2).T

    def _of_copy(
        self,
        source: fx.Node,
        states: tuple[State, ...],
        fates: tuple[int, ...],
        copies: tuple[State, ...],
        again: tuple[int, ...],
        ends: tuple[bool, ...],
    ) -> np.ndarray:
        """What a copy's fates cost with the producer's state and fate. again: the segments in which
        it may be computed again; ends: whether that is the last."""
        table = np.zeros((len(states), len(fates), len(copies), AGAIN + len(again)))
        for s, have in enumerate(states):
            for c, state in enumerate(copies):
                if forward_value(have) == forward_value(state):
                    table[s, :, c, KEPT:] = np.inf
                    continue
                size = self.walk.saving.nbytes(source, state)
                seconds = self.walk.change_seconds(source, have, state)
                for k, place in enumerate(again):
                    own = self._again(seconds, size, ends[k])
                    for f, fate in enumerate(fates):
                        reads = fate == KEPT or (fate == AGAIN and place in (0, ANYWHERE))
                        table[s, f, c, AGAIN + k] = own if reads else np.inf
        return table.reshape(table.shape[0] * table.shape[1], -1)

    def _put(self, variables: tuple[int, ...], table: np.ndarray) -> None:
        scope = tuple(sorted(set(variables)))
        self._extra.setdefault(scope, []).append((variables, table))

    def _graph(self) -> FactorGraph:
        graph = FactorGraph(MOST_ENTRIES, MOST_WORK, fill_order)
        for variable, costs in enumerate(self.base.graph.unary):
            fates = self.fates[variable]
            both = np.repeat(costs, len(fates))
            if variable in self.own:
                size, seconds = self.own[variable]
                both = both + size * self.price + seconds
            graph.variable(len(both), both, f"variable {variable}")
        sums: dict[Any, np.ndarray] = {}
        scopes = dict.fromkeys((*self.base.graph.tables, *self._extra))
        for scope in scopes:
            table, extra = self.base.graph.tables.get(scope), self._extra.get(scope, [])
            counts = tuple(len(self.fates[v]) for v in scope)
            places = tuple(tuple(scope.index(v) for v in each) for each, _ in extra)
            key = (id(table), counts, places, tuple(id(one) for _, one in extra))
            if key not in sums:
                sums[key] = _sum(scope, table, counts, extra)
            graph.add(scope, sums[key])
        return graph


def _sum(
    scope: tuple[int, ...],
    table: np.ndarray | None,
    counts: tuple[int, ...],
    extra: list[tuple[tuple[int, ...], np.ndarray]],
) -> np.ndarray:
    """The planner's table, repeated for each fate, and the tables of fates."""
    total: Any = 0.0
    if table is not None:
        total = table
        for axis, count in enumerate(counts):
            total = np.repeat(total, count, axis)
    letters = {v: chr(97 + i) for i, v in enumerate(scope)}
    for variables, one in extra:
        equation = "".join(letters[v] for v in variables) + "->" + "".join(letters.values())
        total = total + np.einsum(equation, one)
    return np.asarray(total)
