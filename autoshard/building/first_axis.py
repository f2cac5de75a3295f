"""A mesh with two planned axes: the first, cp, is planned and laid out; tp is planned on its rank.

cp is planned on the whole graph, as if tp had one rank; what a rank of tp does of it is an equal
part, so that bytes and arithmetic have the same ratio. The graph of a rank of cp then has the
collectives over cp as operators, whose rules are known (planning/rules/outer_axis.py), and is
planned on tp like any other. Every cp rank has the same graph, because only dims are split that cp
divides. Weights are whole in it: they are stored by rows, and gathered with those of the
data-parallel axes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

from torch import fx

from autoshard.config import Config
from autoshard.passes import Localize, rank_program
from autoshard.planning import Outer, Plan, Request, plan_graph, with_graph
from autoshard.planning.cost import Hardware
from autoshard.runtime.collectives import Axis, R
from autoshard.runtime.mesh import Mesh

T = TypeVar("T")


def lay_out(
    serial: fx.GraphModule,
    parameters: Mapping[fx.Node, str],
    mesh: Mesh,
    axis: Axis,
    config: Config,
    machine: Hardware,
    plan: Plan | None,
) -> tuple[fx.GraphModule, Outer, Plan]:
    """The graph of a rank of `axis`, what it was made of, and the plan with this graph's part."""
    request = Request(
        axis=axis.name,
        parameters=parameters,
        stored=dict.fromkeys(parameters, R),
        lazy_outputs=config.outputs in ("lazy", "sharded"),
        outputs_read=config.outputs != "sharded",
        plan=plan,
        even=True,
        beside=mesh.planned.size,
    )
    decisions = plan_graph(serial, axis.size, machine, request)
    full = with_graph(plan, decisions, request, serial, axis.size)
    passes = [Localize(decisions, config.recompute_collectives, functional=True)]
    own, _ = rank_program(serial, passes, axis)
    outer = Outer(serial=serial, decisions=decisions, axis=axis, parameters=parameters)
    return own, outer, replace(full, parameters={})


def placed(
    old: fx.GraphModule, new: fx.GraphModule, table: Mapping[fx.Node, T]
) -> dict[fx.Node, T]:
    """A table by the placeholders of a graph, by those of another that has as many."""
    places = [gm.graph.find_nodes(op="placeholder") for gm in (old, new)]
    moved = dict(zip(*places, strict=True))
    return {moved[node]: one for node, one in table.items()}
