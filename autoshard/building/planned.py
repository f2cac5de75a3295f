"""A captured graph: what is asked of its plan, and with its decisions, before it is rewritten."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import fx

from autoshard.building.batch_choices import with_choices
from autoshard.building.first_axis import lay_out, placed
from autoshard.config import Config
from autoshard.planning import (
    Decisions,
    Outer,
    Plan,
    Recomputation,
    Request,
    plan_graph,
    with_graph,
)
from autoshard.planning.chunked_loss import Chunking, plan_losses
from autoshard.planning.cost import Machine
from autoshard.runtime.collectives import State
from autoshard.runtime.mesh import Mesh


@dataclass(frozen=True)
class Unplanned:
    """A captured graph with what is asked of its plan, before it has one.

    data: the states of its parameters on the data-parallel axes, by axis.
    """

    serial: fx.GraphModule
    request: Request
    data: dict[fx.Node, dict[str, State]]
    mesh: Mesh
    config: Config
    machine: Machine

    def within(self, budget: int) -> Unplanned:
        """The same under another memory budget."""
        return replace(self, request=replace(self.request, memory_budget=budget))

    def plan(self) -> Planned:
        """Plan the graph; of a mesh with two planned axes, that of a rank of the outer one."""
        serial, request, mesh, data = self.serial, self.request, self.mesh, self.data
        plan, n, first = request.plan, mesh.planned.size, None
        if mesh.outer is not None:
            of = plan.outer if plan else None
            given = (mesh, mesh.outer, self.config, self.machine)
            laid = lay_out(serial, request, *given, of)
            data = placed(serial, laid.graph, data)
            serial, request, first = laid.graph, laid.request, laid.plan
            decisions = laid.decisions
        else:
            decisions = plan_graph(serial, n, self.machine, request)
        return Planned(
            serial,
            request,
            with_choices(data, decisions, request.layout),
            decisions,
            replace(with_graph(plan, decisions, request, serial, n), outer=first),
        )


@dataclass(frozen=True)
class Planned:
    """A captured graph with its decisions, before it is rewritten.

    plan: the decisions of this graph joined to those of the plan it was asked to follow.
    """

    serial: fx.GraphModule
    request: Request
    data: dict[fx.Node, dict[str, State]]
    decisions: Decisions
    plan: Plan

    @property
    def parameters(self) -> Mapping[fx.Node, str]:
        """The name of each parameter placeholder."""
        return self.request.parameters

    @property
    def outer(self) -> Outer | None:
        """The plan of the axis that was laid out before, of a rank of which the graph is."""
        return self.request.outer

    def following(self, decisions: Decisions) -> Planned:
        """The same graph with other decisions."""
        n, layout = decisions.prices.n, self.request.layout
        plan = with_graph(self.request.plan, decisions, self.request, self.serial, n)
        plan = replace(plan, outer=self.plan.outer)
        data = with_choices(self.data, decisions, layout)
        return replace(self, decisions=decisions, data=data, plan=plan)

    def recomputing(self, chosen: Recomputation | None) -> Planned:
        """The same plan with another choice of what is computed again."""
        return replace(self, decisions=replace(self.decisions, recomputation=chosen))

    def with_losses(self, fits: bool) -> Planned:
        """The same plan with losses by chunks, or whole, as is asked where a step stays within its
        budget otherwise, or does not."""
        how = self.request.chunking if fits else self.request.chunking_to_fit
        return self.chunked(how)

    def chunked(self, how: Chunking | None) -> Planned:
        """The same plan with losses as `how` asks."""
        found = plan_losses(self.serial, self.decisions, self.decisions.prices.n, how)
        return replace(self, decisions=replace(self.decisions, losses=found))

    @property
    def chunks(self) -> bool:
        """Whether a loss goes by chunks."""
        return any(one.chunked for one in self.decisions.losses.values())
