"""A captured graph: what is asked of its plan, and with its decisions, before it is rewritten.

What dp_shard does with each weight (`zero="auto"`) is asked of a plan, and read from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import fx, nn
from torch.distributed.tensor import DTensor

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
from autoshard.planning.estimate import Layout
from autoshard.runtime import compat
from autoshard.runtime.collectives import ONCE, TWICE, WHOLE, Axis, I, S, State
from autoshard.runtime.errors import PlanError
from autoshard.runtime.mesh import Mesh
from autoshard.runtime.parameters import choice_of, is_planned, stored_states


def load_plan(plan: Any, axis: Axis, outer: Axis | None = None, stages: int = 1) -> Plan | None:
    """The plan an option gives, by object or by path, checked against the axes."""
    if plan is None:
        return None
    loaded = plan if isinstance(plan, Plan) else Plan.load(Path(plan))
    plans = [one for one in (loaded.outer, loaded) if one is not None]
    pp = loaded.pipeline.ranks if loaded.pipeline is not None else 1
    its = _spelled(pp, [f"{one.axis}={one.size}" for one in plans])
    own = _spelled(stages, [f"{one.name}={one.size}" for one in (outer, axis) if one is not None])
    if its != own:
        raise PlanError(
            f"the plan is for {its}, this mesh has {own}: "
            "make a plan for this mesh, or change options['mesh']"
        )
    return loaded


def _spelled(stages: int, planned: Sequence[str]) -> str:
    return " and ".join([f"pp={stages}", *planned] if stages > 1 else planned)


def layout_of(config: Config, mesh: Mesh, plan: Plan | None, trains: bool) -> Layout:
    """The data-parallel half of a mesh, for the planner. A plan that has choices is obeyed whatever
    `zero` says. trains: whether the graph has gradients; one without leaves weights split, since
    one that trains may follow.
    """
    told = bool(plan and plan.weights)
    chooses = config.zero == "auto" or told
    sizes = mesh.sizes
    zero = ("auto" if trains or told else 3) if chooses else config.zero
    return Layout.of(sizes, zero, config.bucket_bytes, config.defer_reduction)


def refuse_twice(plan: Plan | None, layout: Layout) -> None:
    """Raise PlanError for a plan that gathers a weight again where all are gathered once a step."""
    weights = plan.weights if plan is not None else {}
    names = [name for name, choice in weights.items() if choice == TWICE]
    if layout.staged and names:
        raise PlanError(
            f"the plan gathers {names[0]} twice on dp_shard, and beside pp a weight is gathered "
            f"before the first micro-batch and kept to the last. Say {ONCE!r} or {WHOLE!r}."
        )


def choices_made(
    placeholders: list[fx.Node],
    inputs: Sequence[compat.GraphInput],
    layout: Layout,
) -> dict[fx.Node, str]:
    """The choices of parameters that are stored already: what was decided with their storage, or
    what follows from it."""
    return {
        node: choice_of(item.real) or _follows(item.real, layout)
        for node, item in zip(placeholders, inputs, strict=True)
        if isinstance(item.real, nn.Parameter) and is_planned(item.real)
    }


def _follows(stored: nn.Parameter, layout: Layout) -> str:
    states = stored_states(stored) if isinstance(stored, DTensor) else {}
    if not stored.dim() or states.get("dp_shard", S(0)) == I:
        return WHOLE
    return ONCE if layout.staged else TWICE


def with_choices(
    data: Mapping[fx.Node, dict[str, State]], decisions: Decisions, layout: Layout
) -> dict[fx.Node, dict[str, State]]:
    """The states of stored parameters on the data-parallel axes, with the choices of a plan."""
    found, splits = dict(data), layout.shard > layout.inner
    for node, choice in decisions.weights.items():
        others = {name: state for name, state in data[node].items() if name != "dp_shard"}
        found[node] = {"dp_shard": S(0), **others} if splits and choice != WHOLE else others
    return found


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
        base = replace(plan or Plan(request.axis, n), outer=first)
        return Planned(serial, request, data, decisions, base).following(decisions)


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
        made = self.decisions
        found = plan_losses(self.serial, made.strategies, made.prices.n, how)
        return replace(self, decisions=replace(made, losses=found))

    @property
    def chunks(self) -> bool:
        """Whether a loss goes by chunks."""
        return any(one.chunked for one in self.decisions.losses.values())
