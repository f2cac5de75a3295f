"""A captured graph with its decisions, before it is rewritten."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from autoshard.building.batch_choices import with_choices
from autoshard.planning import Decisions, Outer, Plan, Request, with_graph
from autoshard.planning.chunked_loss import plan_losses
from autoshard.runtime.collectives import State


@dataclass
class Planned:
    """A captured graph with its decisions, before it is rewritten.

    plan: the decisions of this graph joined to those of the plan it was asked to follow, `asked`.
    outer: the plan of the axis that was laid out before, of a rank of which the graph is.
    """

    serial: fx.GraphModule
    parameters: dict[fx.Node, str]
    data: dict[fx.Node, dict[str, State]]
    decisions: Decisions
    plan: Plan
    asked: Plan | None
    request: Request
    outer: Outer | None = None

    def take(self, decisions: Decisions) -> None:
        """Follow other decisions on the same graph."""
        n, outer = decisions.prices.n, self.plan.outer
        self.decisions = decisions
        self.data = with_choices(self.data, decisions, self.request.layout)
        self.plan = with_graph(self.asked, decisions, self.request, self.serial, n)
        self.plan.outer = outer

    def plan_losses(self, decisions: Decisions, fits: bool) -> bool:
        """Decide which losses of the graph go by chunks under `decisions`; whether any does. fits:
        whether a step stays within its budget otherwise."""
        how = self.request.chunking if fits else self.request.chunking_to_fit
        decisions.losses = plan_losses(self.serial, decisions, decisions.prices.n, how)
        return any(one.chunked for one in decisions.losses.values())
