"""What dp_shard does with each weight (`zero="auto"`): asked of a plan, and read from it."""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx, nn

from autoshard.config import Config
from autoshard.errors import ConfigError, message
from autoshard.planning import Decisions, Plan
from autoshard.planning.estimate import Layout
from autoshard.runtime import compat
from autoshard.runtime.collectives import TWICE, WHOLE, I, S, State
from autoshard.runtime.mesh import Mesh
from autoshard.runtime.parameters import choice_of, is_planned


def layout_of(config: Config, mesh: Mesh, plan: Plan | None, trains: bool) -> Layout:
    """The data-parallel half of a mesh, for the planner. A plan that has choices is obeyed whatever
    `zero` says. trains: whether the graph has gradients; one without leaves weights split, since
    one that trains may follow.

    Raises ConfigError where there is a choice beside ep, whose experts are stored otherwise.
    """
    told = bool(plan and plan.weights)
    chooses = config.zero == "auto" or told
    sizes = {one.name: one.size for one in mesh.axes}
    if chooses and sizes.get("ep", 1) > 1:
        raise ConfigError(
            message(
                "zero='auto' beside ep in the mesh is not supported yet",
                remedy="Leave ep out of the mesh, or give zero=1, 2 or 3.",
            )
        )
    zero = ("auto" if trains or told else 3) if chooses else config.zero
    return Layout.of(sizes, zero, config.bucket_bytes, config.defer_reduction)


def choices_made(
    placeholders: list[fx.Node],
    inputs: list[compat.GraphInput],
    data: Mapping[fx.Node, Mapping[str, State]],
) -> dict[fx.Node, str]:
    """The choices of parameters that are stored already: what was decided with their storage, or
    what follows from it."""
    return {
        node: choice_of(item.real) or (WHOLE if data[node].get("dp_shard", I) == I else TWICE)
        for node, item in zip(placeholders, inputs, strict=True)
        if isinstance(item.real, nn.Parameter) and is_planned(item.real)
    }


def with_choices(
    data: Mapping[fx.Node, dict[str, State]], decisions: Decisions
) -> dict[fx.Node, dict[str, State]]:
    """The states of stored parameters on the data-parallel axes, with the choices of a plan."""
    found = dict(data)
    for node, choice in decisions.weights.items():
        others = {name: state for name, state in data[node].items() if name != "dp_shard"}
        found[node] = others if choice == WHOLE else {"dp_shard": S(0), **others}
    return found
