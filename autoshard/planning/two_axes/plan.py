"""The plan of the outer of two axes that are planned together, and the least that both can cost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx

from autoshard.planning.asked import Request, fingerprint
from autoshard.planning.cost import Machine
from autoshard.planning.decisions import Decisions
from autoshard.planning.head_tail import HeadTail
from autoshard.planning.one_axis import builder_of, dearer, decided, may_be_sharded, of_a_byte
from autoshard.planning.outer import Origin
from autoshard.planning.prices import Prices
from autoshard.planning.solver import TooWide
from autoshard.planning.strategy import value
from autoshard.planning.two_axes.problem import JointBuilder
from autoshard.planning.two_axes.values import Parts
from autoshard.planning.values import differentiable
from autoshard.runtime.graph_meta import MUTATED, WITHOUT_GRADIENTS


@dataclass(frozen=True, kw_only=True)
class TwoAxes:
    """What is asked of two axes of one graph: the requests of both, by its placeholders, and the
    ranks of each. parts: makes the nodes of a rank of the outer axis."""

    outer: Request
    inner: Request
    ranks: tuple[int, int]
    parts: Parts


def plan_both(
    gm: fx.GraphModule, machine: Machine, asked: TwoAxes, prices: Prices | None = None
) -> Decisions | None:
    """The outer plan of the cheapest two; its `seconds` are the least that any two plans cost, by
    what the planner of the inner axis charges on a rank's graph. prices: of bytes, on both axes.

    None where one axis is planned after the other: a graph without gradients, or that writes to its
    inputs, or with symbolic sizes, or that is too entangled, or whose plan is given.
    """
    plan = asked.outer.plan
    given = plan is not None and fingerprint(gm) in plan.graphs
    return None if given or not _is_plain(gm) else _solve(gm, machine, asked, prices or Prices())


def both_at_dearer_bytes(
    gm: fx.GraphModule, machine: Machine, asked: TwoAxes, default: Decisions, byte: float
) -> Iterator[Decisions]:
    """Other outer plans than `default`, each of the cheapest two at a price of a byte above `byte`,
    for a rank that has less memory than those take; each once."""
    known = [default.graph_plan()]
    for price in dearer(byte):
        found = plan_both(gm, machine, asked, of_a_byte(price, machine, asked.inner))
        if found is not None and (plan := found.graph_plan()) not in known:
            known.append(plan)
            yield found


def _solve(
    gm: fx.GraphModule,
    machine: Machine,
    asked: TwoAxes,
    prices: Prices,
    contiguous: bool = False,
) -> Decisions | None:
    n, m = asked.ranks
    outer = builder_of(gm, n, machine, asked.outer, prices, contiguous)
    alone = outer.build()
    origin = Origin(gm, outer.prices)
    inner = builder_of(gm, m, machine, asked.inner, prices, origin=origin)
    results = gm.graph.output_node().args[0]
    sharded = [may_be_sharded(gm, i, one, asked.inner) for i, one in enumerate(results)]  # type: ignore[arg-type, union-attr]
    problem = JointBuilder(outer, alone, inner, asked.parts, sharded).build()
    try:
        solution = problem.graph.solve()
    except TooWide:
        return None
    read = problem.read(solution, alone)
    ordered = HeadTail(gm.graph, n, *read, asked.outer.contiguous_outputs)
    if ordered.unbalanced and not contiguous:  # which costs more than was thought
        return _solve(gm, machine, asked, prices, contiguous=True)
    variables = len(problem.variables) + len(problem.copies)
    return decided(ordered, alone, solution, variables, outer.prices, asked.outer, [])


def _is_plain(gm: fx.GraphModule) -> bool:
    nodes = list(gm.graph.nodes)
    if gm.meta.get(MUTATED) or gm.meta.get(WITHOUT_GRADIENTS):
        return False
    if not any(map(differentiable, nodes)):
        return False
    values = [value(node) for node in nodes]
    tensors = [one for one in values if isinstance(one, torch.Tensor)]
    symbols = any(isinstance(one, (torch.SymInt, torch.SymFloat, torch.SymBool)) for one in values)
    return not symbols and all(isinstance(e, int) for one in tensors for e in one.shape)
