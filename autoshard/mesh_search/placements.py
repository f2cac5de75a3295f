"""The plan of a row that is short of memory: what the backend would choose under that budget.

Where the cheapest plan does not fit as it is, placements are planned at dearer bytes
(planning/search/one_axis.py), each with the least recomputation with which it fits. The cheapest
plan with its own is one of these candidates, so that no row is predicted slower than with it. What
a plan needs is estimated here, where the backend counts it.

Rows are tried in the order of what they do if nothing is computed again, until one that was tried
does more than the next could: of those that are left, which cannot be recommended, only those are
tried that do not fit.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from copy import copy
from functools import cached_property

from autoshard.mesh_search.factorisations import AxisSizes
from autoshard.mesh_search.prices import MeshPrice, MeshPrices
from autoshard.planning import Decisions, at_dearer_bytes

_NEARLY = 1.01
"""Norm weights and biases are less than a hundredth of a model."""


class Placements:
    """The plans of one graph on one size of its axes, by the mesh of a row."""

    def __init__(self, first: MeshPrices, dearer: list[Decisions]) -> None:
        """first: the cheapest plan, whatever the memory. dearer: its plans at dearer bytes, where
        they were made with other options."""
        self.first, self.dearer = first, dearer

    def most(self, mesh: AxisSizes) -> float:
        """The utilisation of the cheapest plan, if it had all the memory it needs."""
        return self.first.row(mesh, sys.maxsize).mfu

    def better(self, before: MeshPrice) -> MeshPrice:
        """The row of a mesh without pp, with the quickest plan that fits; where none does, as it
        was, with the cheapest plan."""
        quickest, best = before.timing.step if before.fits else math.inf, None
        for made in self._at_dearer_bytes:
            if made.row(before.mesh, sys.maxsize).timing.step < quickest:
                row = made.row(before.mesh)
                if row.fits and row.timing.step < quickest:
                    quickest, best = row.timing.step, made
        if best is None:
            return before
        taken = copy(best)  # with its plan as a file has it
        taken.planned = best.planned.following(best.planned.decisions).recomputing(None)
        row = taken.row(before.mesh)
        return before if before.fits and row.timing.step > before.timing.step else row

    @cached_property
    def _at_dearer_bytes(self) -> list[MeshPrices]:
        one = self.first.planned
        given = (one.serial, self.first.n, one.request, one.decisions)
        self.dearer += () if self.dearer else at_dearer_bytes(*given)
        return list(map(self.first.following, self.dearer))

    def may_gain(self, before: MeshPrice) -> bool:
        """Whether another plan may be quicker, or fit. With zero="auto" the plan is of the row's
        own memory already."""
        first = self.first
        if first.n == 1 or not first.cuts or first.asked.config.zero == "auto":
            return False
        if before.fits:
            chosen = before.recomputation
            return chosen is not None and chosen.seconds > first.frontier.points[0].seconds
        held, least = before.memory, self._least_states(before.mesh)
        states = held.parameters + held.gradients + held.optimizer
        if states <= _NEARLY * least:  # all is split: only activations can be less
            least = held.total - held.activations
        return least <= first.asked.limit

    def _least_states(self, mesh: AxisSizes) -> float:
        """Bytes of parameters and of what trains them, if all ranks shared each."""
        training, weights = self.first.training, self.first.free.weights
        total = sum(sum(one.holds(math.prod(one.whole_shape), training)) for one in weights)
        return total / (self.first.n * self.first.asked.layout(mesh).shard)


def within_memory(
    rows: Sequence[tuple[MeshPrice, Placements]],
    beside: Sequence[MeshPrice],
    say: Callable[[str], None],
) -> list[MeshPrice]:
    """The rows of a search; those that may be recommended, or do not fit, with the quickest plan
    that fits. beside: rows that stay as they are. say: told what is tried."""
    found = {id(row): row for row, _ in rows}
    every = [*found.values(), *beside]
    best = max((row.mfu for row in every if row.fits and not row.refused), default=0.0)
    short = [(plans.most(row.mesh), row, plans) for row, plans in rows if plans.may_gain(row)]
    for most, row, plans in sorted(short, key=lambda one: -one[0]):
        if most > best or not row.fits:
            say("fitting " + " ".join(f"{name}={size}" for name, size in row.mesh.items()))
            found[id(row)] = plans.better(row)
            best = max(best, found[id(row)].mfu * found[id(row)].fits)
    return [*found.values(), *beside]
