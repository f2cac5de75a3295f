"""Of a mesh with two planned axes: the plan of the first of them, and the graph it was made for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx

from autoshard.planning.decisions import Decisions
from autoshard.runtime.collectives import Axis


@dataclass(frozen=True, kw_only=True)
class Outer:
    """The plan of an axis that was laid out before the planned one, whose graph is that of a rank.

    serial: the whole graph, on no axis. decisions: its plan on `axis`. parameters: name of each
    parameter placeholder of it.
    """

    serial: fx.GraphModule
    decisions: Decisions
    axis: Axis
    parameters: Mapping[fx.Node, str]


def on_rank(gm: fx.GraphModule, axis: Axis) -> None:
    """Give the operators of a graph that run over the axis of that name this one's rank and group,
    in place."""

    def moved(argument: Any) -> Any:
        if isinstance(argument, Axis):
            return axis if argument.name == axis.name else argument
        # a named tuple (a parameter's policy) has no axis, and must stay what it is
        return tuple(map(moved, argument)) if type(argument) is tuple else argument

    for node in gm.graph.nodes:
        node.args = moved(node.args)
        node.kwargs = {name: moved(one) for name, one in node.kwargs.items()}
    gm.recompile()
