"""A mesh with two planned axes: the first, cp, is planned and laid out; tp is planned on its rank.

Both are planned together, exactly, where the graph trains (planning/search); else cp is planned
on the whole graph as if tp had one rank, which is also what a plan file is followed by. Under a
memory budget that they fit by recomputation alone, plans of cp at dearer bytes are laid out too,
each with tp's placements and what is kept decided together, and the quickest that fits is taken.
The graph of a rank of cp then has the collectives over cp as operators, whose rules are known
(planning/rules/outer_axis.py), and is planned on tp like any other, or cut into the stages of pp.
Every cp rank has the same graph, because only dims are split that cp divides. Weights are whole in
it: they are stored by rows, and gathered with those of the data-parallel axes.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import fx

from autoshard.config import Config
from autoshard.errors import PlanError
from autoshard.passes import Localize, Rewriting, local_value, rank_program
from autoshard.planning import (
    Decisions,
    Outer,
    Plan,
    PlanEstimate,
    Request,
    Strategy,
    TwoAxes,
    both_at_dearer_bytes,
    estimates,
    plan_both,
    plan_graph,
    value,
    with_graph,
)
from autoshard.planning.cost import Machine
from autoshard.runtime.collectives import Axis, R, State, redistribute
from autoshard.runtime.graph_meta import DIFF
from autoshard.runtime.mesh import Mesh

T = TypeVar("T")


@dataclass(frozen=True)
class LaidOut:
    """The graph of a rank of the outer axis with its plan on the inner one. plan: of the outer one,
    of this graph too. request: what was asked of the inner one."""

    graph: fx.GraphModule
    outer: Outer
    plan: Plan
    request: Request
    decisions: Decisions

    @property
    def seconds(self) -> float:
        """Of a step, as the planner charges it, whatever the budget."""
        return self.decisions.compared

    def estimate(self, decisions: Decisions) -> PlanEstimate:
        """What a step takes and needs with a plan of the inner axis, under the memory budget."""
        budget = self.request.memory_budget
        assert budget is not None
        return estimates(self.graph, decisions.prices.n, self.request, budget)(decisions)


class RankParts(Rewriting):
    """Single operators and changes of state of the graph of a rank of `axis` that `gm` may become.

    Where two axes are planned together, the choices on the second depend on the shapes that the
    first leaves: those of an operator, in each of its strategies, are asked for one at a time. What
    `Localize` would emit is made, from operands that stand alone.

    operand_of: the node of `gm` that each operand of a part stands for.
    """

    def __init__(self, gm: fx.GraphModule, axis: Axis) -> None:
        chosen: Any = SimpleNamespace(strategies={}, recomputation=None)
        super().__init__(gm, chosen, axis, "gathers", True)
        self.operand_of: dict[fx.Node, fx.Node] = {}
        self._operands: dict[tuple[fx.Node, State], fx.Node] = {}
        self._tensors: dict[tuple[object, ...], torch.Tensor] = {}

    def operator(self, node: fx.Node, strategy: Strategy) -> fx.Node:
        """What runs on a rank for `node`."""
        self.decisions.strategies[node] = strategy
        self._call_function(node)
        return self.local[node]

    def change(self, source: fx.Node, have: State, want: State) -> fx.Node:
        """A change of state of the value of `source`."""
        at = self.convert(source, have, source)
        new = self._emit(source, redistribute, (at, have, want, self.axis, None))
        new.meta["val"] = self.tensor(value(source), want)
        return new

    def tensor(self, val: torch.Tensor, state: State) -> torch.Tensor:
        """A value as a rank has it, of all that are alike one."""
        key = tuple(val.shape), val.stride(), val.dtype, val.device, val.requires_grad, state
        if key not in self._tensors:
            self._tensors[key] = local_value(val, state, self.axis)
        return self._tensors[key]

    def convert(self, source: fx.Node, want: State, user: fx.Node) -> fx.Node:
        """An operand in the state `want`, wherever it comes from."""
        if (source, want) not in self._operands:
            new = self.graph.create_node("placeholder", source.name)
            new.meta = {"val": self.tensor(value(source), want), DIFF: source.meta.get(DIFF)}
            self._operands[source, want] = new
            self.operand_of[new] = source
        return self._operands[source, want]


def lay_out(
    serial: fx.GraphModule,
    inner: Request,
    mesh: Mesh,
    axis: Axis,
    config: Config,
    machine: Machine,
    plan: Plan | None,
) -> LaidOut:
    """Plan both axes of a graph. inner: what is asked of the inner one, by the placeholders of
    `serial`. plan: of `axis`, to follow."""
    request = Request(
        axis=axis.name,
        parameters=inner.parameters,
        stored=dict.fromkeys(inner.parameters, R),
        lazy_outputs=config.outputs in ("lazy", "sharded"),
        outputs_read=config.outputs != "sharded",
        plan=plan,
        even=True,
        beside=mesh.planned.size,
    )

    def laid_out(decisions: Decisions, bound: float | None) -> LaidOut:
        full = replace(with_graph(plan, decisions, request, serial, axis.size), parameters={})
        passes = [Localize(decisions, config.recompute_collectives, functional=True)]
        own, _ = rank_program(serial, passes, axis)
        outer = Outer(
            serial=serial,
            decisions=decisions,
            axis=axis,
            parameters=inner.parameters,
            bound=bound,
        )
        of_rank = replace(
            inner,
            parameters=placed(serial, own, inner.parameters),
            stored=placed(serial, own, inner.stored),
            chosen=placed(serial, own, inner.chosen),
            arriving=placed(serial, own, inner.arriving),
            outer=outer,
        )
        return LaidOut(
            own, outer, full, of_rank, plan_graph(own, mesh.planned.size, machine, of_rank)
        )

    parts, ranks = RankParts(serial, axis), (axis.size, mesh.planned.size)
    asked = TwoAxes(outer=request, inner=inner, ranks=ranks, parts=parts)
    both = plan_both(serial, machine, asked)
    if both is None:
        return laid_out(plan_graph(serial, axis.size, machine, request), None)
    found = laid_out(both, both.seconds)
    if found.outer.gap(found.decisions):
        # a value in three states over cp at once, which the bound counts in part
        apart = laid_out(plan_graph(serial, axis.size, machine, request), both.seconds)
        found = min(found, apart, key=lambda one: one.seconds)
    first = found.decisions.unbudgeted
    if first is None or found.estimate(first).fits:
        return found
    byte = first.prices.parameter_byte
    others = both_at_dearer_bytes(serial, machine, asked, found.outer.decisions, byte)
    return quickest(found, (partial(laid_out, one, both.seconds) for one in others))


def quickest(default: LaidOut, others: Iterable[Callable[[], LaidOut]]) -> LaidOut:
    """The quickest of those that are estimated to fit the memory budget, where `default` is one.
    Else `default`: an estimate may be above what its graphs need, which are counted later."""
    best, tried, budget = default, 1, default.request.memory_budget
    least = default.estimate(default.decisions)
    if budget is None or least.least > budget:
        return default
    for make in others:
        tried += 1
        try:
            one = make()
        except PlanError:  # what trains its weights is too much
            continue
        what = one.estimate(one.decisions)
        if what.least <= budget and what.seconds < least.seconds:
            best, least = one, what
    outer = replace(best.outer, tried=tried, dearer=best is not default)
    return replace(best, outer=outer, request=replace(best.request, outer=outer))


def placed(
    old: fx.GraphModule, new: fx.GraphModule, table: Mapping[fx.Node, T]
) -> dict[fx.Node, T]:
    """A table by the placeholders of a graph, by those of another that has as many."""
    places = [gm.graph.find_nodes(op="placeholder") for gm in (old, new)]
    moved = dict(zip(*places, strict=True))
    return {moved[node]: one for node, one in table.items()}
