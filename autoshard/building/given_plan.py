"""The plan that the option `plan` gives."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from autoshard.planning import Plan
from autoshard.runtime.collectives import Axis
from autoshard.runtime.errors import PlanError


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
