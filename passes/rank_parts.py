"""Single operators and changes of state of a rank's graph, made without the graph.

Where two axes are planned together, the choices on the second depend on the shapes that the first
leaves: those of an operator, in each of its strategies, are asked for one at a time. What
`Localize` would emit is made, from operands that stand alone.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import fx

from autoshard.passes.base import local_value
from autoshard.passes.localize import Rewriting
from autoshard.planning import Strategy, value
from autoshard.runtime.collectives import Axis, State, redistribute
from autoshard.runtime.graph_meta import DIFF


class RankParts(Rewriting):
    """The parts of the graph of a rank of `axis` that `gm` may become.

    operand_of: the node of `gm` that each operand of a part stands for.
    """

    def __init__(self, gm: fx.GraphModule, axis: Axis) -> None:
        chosen: Any = SimpleNamespace(strategies={}, recomputation=None)
        super().__init__(gm, chosen, axis, "gathers", True)
        self.operand_of: dict[fx.Node, fx.Node] = {}
        self._operands: dict[tuple[fx.Node, State], fx.Node] = {}

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
        """A value as a rank has it."""
        return local_value(val, state, self.axis)

    def convert(self, source: fx.Node, want: State, user: fx.Node) -> fx.Node:
        """An operand in the state `want`, wherever it comes from."""
        if (source, want) not in self._operands:
            new = self.graph.create_node("placeholder", source.name)
            new.meta = {"val": self.tensor(value(source), want), DIFF: source.meta.get(DIFF)}
            self._operands[source, want] = new
            self.operand_of[new] = source
        return self._operands[source, want]
