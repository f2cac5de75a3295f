"""A pipeline's part of a plan file: what it asks of a graph, and what a graph that is cut adds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import fx

from autoshard.building.pipeline.microbatch import MicrobatchGraph
from autoshard.building.pipeline.stages import StagePlan
from autoshard.building.planned import load_plan
from autoshard.config import Config, option
from autoshard.errors import ConfigError, message
from autoshard.planning import PipelinePlan, Plan, fingerprint
from autoshard.runtime.mesh import Mesh
from autoshard.runtime.pipeline import ScheduleShape


def followed(config: Config, mesh: Mesh, ranks: int) -> tuple[Config, Plan | None]:
    """The options with the schedule of the plan to follow, and that plan.

    Raises PlanError for a plan of another mesh, and ConfigError for options that contradict it or
    each other.
    """
    plan = load_plan(config.plan, mesh.planned, mesh.outer, ranks)
    asked = plan.pipeline if plan is not None else None
    if asked is not None:
        for name in ("schedule", "microbatches", "virtual_stages"):
            own, its = getattr(config, name), getattr(asked, name)
            if own not in (None, its):
                raise ConfigError(
                    message(
                        f"{option(name)}={own!r}, and the plan has {its!r}",
                        remedy=f"Leave {name} out, or make a plan with it.",
                    )
                )
        stages = asked.virtual_stages if asked.schedule == "interleaved" else None
        config = replace(config, schedule=asked.schedule, virtual_stages=stages)
    schedule, _ = config.order
    if config.virtual_stages is not None and schedule != "interleaved":
        raise ConfigError(
            message(
                f"{option('virtual_stages')}={config.virtual_stages} and "
                f"schedule={schedule!r}, with which a rank has one stage",
                remedy="Give schedule='interleaved', or leave virtual_stages out.",
            )
        )
    return config, plan


def homes_of(plan: Plan | None, parameters: Mapping[fx.Node, str]) -> dict[fx.Node, int]:
    """Where a plan stores parameters, of those that it names."""
    asked = plan.pipeline.homes if plan is not None and plan.pipeline is not None else {}
    return {node: asked[name] for node, name in parameters.items() if name in asked}


def cuts_of(plan: Plan | None, microbatch: MicrobatchGraph) -> list[str] | None:
    """The first operator of each stage but the first; None: the plan does not know the graph."""
    asked = plan.pipeline if plan is not None else None
    return None if asked is None else asked.graphs.get(fingerprint(microbatch.local))


def with_stages(
    plan: Plan,
    stages: StagePlan,
    microbatch: MicrobatchGraph,
    parameters: Mapping[fx.Node, str],
    schedule: str,
    shape: ScheduleShape,
) -> Plan:
    """A plan with the stages of this graph added."""
    before = plan.pipeline or PipelinePlan(shape.ranks, schedule, shape.microbatches, shape.chunks)
    homes = {parameters[node]: home for node, home in zip(microbatch.parameters, stages.homes)}
    graphs = {**before.graphs, fingerprint(microbatch.local): stages.firsts}
    return replace(plan, pipeline=replace(before, homes={**before.homes, **homes}, graphs=graphs))
