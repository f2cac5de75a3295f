"""What dp_shard does with each weight (`zero="auto"`): asked of a plan, and read from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import fx, nn
from torch.distributed.tensor import DTensor

from autoshard.config import Config
from autoshard.planning import Decisions, Plan
from autoshard.planning.estimate import Layout
from autoshard.runtime import compat
from autoshard.runtime.collectives import ONCE, TWICE, WHOLE, I, S, State
from autoshard.runtime.errors import PlanError
from autoshard.runtime.mesh import Mesh
from autoshard.runtime.parameters import choice_of, is_planned, stored_states


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
