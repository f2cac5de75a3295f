"""The problem of placements and of what is kept, as one: a variable has a value for each pair of a
strategy (of a copy: a state) and a fate of what it makes.

A value is not there in backward, kept, or computed again. Costs are those of the planner's problem
and, for the graph that those strategies make, those of estimate/recomputation.py: a kept byte costs
its price, what is computed again its seconds, and what it reads must be there. All of that is
between a value and its readers, so the tables have the scopes that they had. A value that one
reader alone moves, without the shared copy, takes the cheapest fate inside of its table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import fx

from autoshard.planning.estimate import Walk, makes_tensors
from autoshard.planning.kept_values.fates import AGAIN, ANY, KEPT, UNREAD, ReadValue, edge_table
from autoshard.planning.problem import Problem
from autoshard.planning.solver import FactorGraph, Solution, fill_order
from autoshard.planning.strategy import Strategy, operands, value
from autoshard.planning.values import output_state, producer
from autoshard.runtime.collectives import State, forward_value

MOST_ENTRIES = 2**26
MOST_WORK = 2**34
"""Table entries in one, and in all; equal tables, those of equal layers, are computed once."""

LEAST_PRICE = 1e-16
"""Of a byte in the last segment: there only what costs nothing is computed again."""


class KeptValues:
    """The joint problem of a planner's problem at one price of a kept byte.

    walk: prices values of the graph; its decisions' strategies are tried one by one, so it must be
    this object's own. segments: by node, that of its value. price: seconds a byte.
    """

    def __init__(
        self, walk: Walk, problem: Problem, segments: Mapping[fx.Node, int], price: float
    ) -> None:
        self.walk, self.base, self.segments, self.price = walk, problem, segments, price
        self.kernels, self.stored = walk.saving.kernels, walk.decisions.stored
        self.last = max(segments.values(), default=0)
        self.fates: dict[int, tuple[int, ...]] = {}
        self.own: dict[int, np.ndarray] = {}
        """By variable: (bytes that are kept, seconds computed again) of each pair."""
        self._extra: dict[tuple[int, ...], list[tuple[tuple[int, ...], np.ndarray]]] = {}
        self._edges: dict[Any, np.ndarray] = {}
        self._needs: dict[fx.Node, list[list[tuple[fx.Node, State]]]] = {}

    def solve(self) -> tuple[Solution, float]:
        """The cheapest of all placements with all fates, as one of the planner's problem, and the
        bytes that it keeps of what operators make and of shared copies. Raises TooWide."""
        for node, variable in self.base.variables.items():
            self._operator(node, variable)
        for source, variable in self.base.copies.items():
            self._copy(source, variable)
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

    def _operator(self, node: fx.Node, variable: int) -> None:
        domain, base = self.base.domains[node], self.kernels.base[node]
        if base.op != "call_function" or not makes_tensors(node):
            self.fates[variable] = (KEPT,)  # there without being kept
        elif self.kernels.is_view(node):
            self.fates[variable] = (UNREAD, KEPT)
        else:
            stays = self.walk.is_made_once(node) or self._crosses(node)
            fates = (UNREAD, KEPT) if stays else ANY
            self.fates[variable] = fates
            rows = [self._fates_of(node, one, fates) for one in domain]
            self.own[variable] = np.array(rows).reshape(-1, 2).T

    def _crosses(self, node: fx.Node) -> bool:
        """Whether a value is read in another segment than its own, by a view or a copy too."""
        readers = [one for one in self.kernels.readers.get(node, []) if one in self.segments]
        return any(self.segments[one] != self.segments[node] for one in readers)

    def _fates_of(
        self, node: fx.Node, strategy: Strategy, fates: tuple[int, ...]
    ) -> list[tuple[float, float]]:
        """(bytes, seconds) of each fate; infinite bytes where the derivative reads the value."""
        self.walk.decisions.strategies[node] = strategy
        state = output_state(strategy, None if isinstance(strategy.output, str) else 0)
        inner, size = self.walk.inner(node, strategy), self.walk.saving.nbytes(node, state)
        needs = self.walk.needs(node)
        self._needs.setdefault(node, []).append(needs)
        needed = any(tensor is node for tensor, _ in needs)
        seconds = self.walk.seconds(node, strategy) * self._scale(self.segments[node])
        of = {UNREAD: (math.inf if needed else inner, 0.0), KEPT: (inner + size, 0.0)}
        return [of.get(fate, (0.0, seconds)) for fate in fates]

    def _scale(self, segment: int) -> float:
        return max(1.0, self.price / LEAST_PRICE) if segment == self.last else 1.0

    def _copy(self, source: fx.Node, variable: int) -> None:
        self.fates[variable] = (KEPT,) if self._is_there(source) else ANY

    def _is_there(self, source: fx.Node) -> bool:
        """Whether a value is a parameter: the planner prices how it is kept."""
        return source in self.stored or not isinstance(value(source), torch.Tensor)

    # Edges

    def _read(self) -> None:
        readers: dict[fx.Node, list[tuple[int, list[State], list[bool], bool, int]]] = {}
        for node, variable in self.base.variables.items():
            view = self.kernels.is_view(node)
            for position, source in enumerate(operands(node)):
                wanted = [one.inputs[position] for one in self.base.domains[node]]
                needs = self._needs.get(node)
                read = [
                    needs is not None and (source, want) in needs[i]
                    for i, want in enumerate(wanted)
                ]
                if not view or position == 0:
                    place = self.segments.get(self.kernels.base[node], 0)
                    readers.setdefault(source, []).append((variable, wanted, read, view, place))
        for source, found in readers.items():
            if not self._is_there(source):
                self._edges_of(source, found)

    def _edges_of(
        self, source: fx.Node, found: list[tuple[int, list[State], list[bool], bool, int]]
    ) -> None:
        owner, index = producer(source)
        x, copy = self.base.variables[owner], self.base.copies.get(source)
        states = [output_state(one, index) for one in self.base.domains[owner]]
        copies = self.base.copy_domains.get(source, [])
        of = [one for one in found if not one[3]]
        first = min((one[4] for one in of), default=0)
        prices = self._prices(source, self.price)
        if copy is not None:
            self.own[copy], extra = self._of_copy(source, states, copies, x, first)
            self._put((x, copy), extra)
        for variable, wanted, read, view, place in found:
            edge = ReadValue(
                have=tuple(states),
                fates=self.fates[x],
                copies=tuple(copies) if copy is not None else None,
                wanted=tuple(wanted),
                read=tuple(read),
                reader=self.fates[variable],
                view=view,
                crosses=place != first,
                scale=self._scale(place),
                shared=max(1, len(of) - 1),
            )
            price = self.walk.decisions.prices.moved(source)
            key = (edge, price, tuple(value(source).shape), value(source).dtype)
            if key not in self._edges:
                change = self.walk.decisions.prices.change_cost(source)
                self._edges[key] = edge_table(edge, prices, change)
            if np.any(self._edges[key]):
                scope = (x, variable) if copy is None else (x, copy, variable)
                self._put(scope, self._edges[key])

    def _prices(
        self, source: fx.Node, price: float
    ) -> Callable[[State, State], tuple[float, float]]:
        walk = self.walk

        def prices(have: State, want: State) -> tuple[float, float]:
            kept = walk.saving.nbytes(source, want) * price
            return kept, walk.change_seconds(source, have, want)

        return prices

    def _of_copy(
        self,
        source: fx.Node,
        states: list[State],
        copies: list[State],
        x: int,
        segment: int,
    ) -> tuple[np.ndarray, np.ndarray]:
        """What a copy's fates cost: bytes by themselves, and seconds with the producer's state."""
        key = ("copy", tuple(states), self.fates[x], tuple(copies), segment == self.last)
        moved = self.walk.decisions.prices.moved(source)
        of = (key, moved, tuple(value(source).shape), value(source).dtype)
        own = np.zeros((2, len(copies) * len(ANY)))
        for c, state in enumerate(copies):
            own[0, c * len(ANY) + KEPT] = self.walk.saving.nbytes(source, state)
        if of not in self._edges:
            table = np.zeros((len(states), len(self.fates[x]), len(copies), len(ANY)))
            for s, have in enumerate(states):
                for c, state in enumerate(copies):
                    if forward_value(have) == forward_value(state):
                        table[s, :, c, [KEPT, AGAIN]] = np.inf
                        continue
                    seconds = self.walk.change_seconds(source, have, state)
                    seconds *= self._scale(segment)
                    for f, fate in enumerate(self.fates[x]):
                        table[s, f, c, AGAIN] = np.inf if fate == UNREAD else seconds
            self._edges[of] = table.reshape(table.shape[0] * table.shape[1], -1)
        return own, self._edges[of]

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
