"""A pipeline of one graph: captured, its batch and its operators cut. Starts no process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx, nn
from torch.distributed.tensor import DTensor

from autoshard.building.batch_check import batch_inputs
from autoshard.building.pipeline.microbatch import MicrobatchGraph, cut_batch
from autoshard.building.pipeline.stages import StagePlan, plan_stages
from autoshard.capture import capture
from autoshard.config import Config
from autoshard.errors import CaptureError, ConfigError, message
from autoshard.passes import prepare
from autoshard.planning import value
from autoshard.planning.cost import Hardware
from autoshard.runtime import compat
from autoshard.runtime.collectives import Axis, H, I, S, State, home_rank
from autoshard.runtime.graph_meta import BUFFER, DIFF
from autoshard.runtime.parameters import is_planned, stored_states
from autoshard.runtime.pipeline import picture, timeline

IN_FLIGHT = 4
"""Micro-batches a stage, where the number is not given: the pipeline then waits for a fifth."""


@dataclass(kw_only=True)
class PipelineProgram:
    """What `pp` made of a graph: the same on all ranks.

    parameters: the name of each by its placeholder in the serial graph. schedule: its name.
    """

    microbatch: MicrobatchGraph
    plan: StagePlan
    parameters: Mapping[fx.Node, str]
    schedule: str

    @property
    def size(self) -> int:
        """The number of stages."""
        return len(self.plan.stages)

    def stored(self) -> dict[fx.Node, State]:
        """The state on pp in which each parameter is stored: at home on the first stage that reads
        it; a scalar on all; one that no output depends on, on the first."""
        homes = dict(zip(self.microbatch.parameters, self.plan.homes))
        return {n: H(homes.get(n, 0)) if value(n).dim() else I for n in self.parameters}

    def idle(self) -> float:
        """The part of a step that stages wait, as the search prices them."""
        forward = [seconds / 3 for seconds in self.plan.stage_seconds]
        backward = [2 * seconds for seconds in forward]
        return timeline(self.schedule, self.microbatch.microbatches, forward, backward).idle

    def lines(self) -> list[str]:
        """The pipeline as text, one line a stage; what ranks compare."""
        plan, m = self.plan, self.microbatch.microbatches
        found = [
            f"schedule {self.schedule}, {m} micro-batches on {self.size} stages, "
            f"idle {self.idle():.0%} of a step, {(self.size - 1) / (m + self.size - 1):.0%} if "
            "stages took equally long"
        ]
        for number, stage in enumerate(plan.stages):
            names = [self.parameters[self.microbatch.parameters[i]] for i in stage.parameters]
            sends = ", ".join(f"{n.name} {tuple(value(n).shape)}" for n in stage.sent) or "nothing"
            found.append(f"stage {number}: reads {', '.join(names)}; sends {sends}")
        return found

    def picture(self) -> str:
        """The schedule as text, where stages take equally long."""
        return picture(self.schedule, self.size, self.microbatch.microbatches)


def build_pipeline(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    inputs: Sequence[compat.GraphInput],
    stages: int,
    config: Config,
    hardware: Hardware,
) -> PipelineProgram:
    """Capture Dynamo's graph, and cut it. Raises CaptureError, ConfigError and PlanError, on all
    ranks alike."""
    known = all(is_planned(i.real) for i in inputs if isinstance(i.real, nn.Parameter))
    serial = capture(gm, example_inputs, {}, inference=known)
    prepare(
        serial, Axis("tp", 1, 0, ""), facts={} if config.recover_masks else None, exchanges=True
    )
    nodes = serial.graph.find_nodes(op="placeholder")
    parameters: dict[fx.Node, str] = {}
    stored: dict[fx.Node, int] = {}
    for node, item in zip(nodes, inputs, strict=True):
        if isinstance(item.real, nn.Parameter):
            parameters[node] = item.name
            if isinstance(item.real, DTensor) and is_planned(item.real):
                home = home_rank(stored_states(item.real).get("pp", I))
                if home is not None:
                    stored[node] = home
        elif node.meta.get(DIFF):
            raise CaptureError(
                message(
                    f"{item.name} needs a gradient and is no parameter: pp cuts a model that is "
                    "one graph, from its batch to its loss",
                    remedy="Remove the graph break before it (torch.compile(fullgraph=True) names "
                    "it), or detach the input.",
                )
            )
        elif item.of_model:
            node.meta[BUFFER] = True
    batch, samples = _batch(nodes, inputs)
    count = _microbatches(config, samples, stages)
    microbatch = cut_batch(serial, parameters, batch, count)
    plan = plan_stages(microbatch, stages, hardware, stored, config.memory_budget)
    return PipelineProgram(
        microbatch=microbatch, plan=plan, parameters=parameters, schedule=config.schedule
    )


def _batch(
    nodes: Sequence[fx.Node], inputs: Sequence[compat.GraphInput]
) -> tuple[dict[fx.Node, State], int]:
    """The inputs with a dim for samples, the first, and how many samples there are."""
    given = [(nodes[i.position], inputs[i.position].name) for i in batch_inputs(inputs)]
    sizes = {node: int(value(node).shape[0]) for node, _ in given if value(node).dim()}
    samples = max(sizes.values(), default=1)
    for node, name in given:
        if sizes.get(node, 1) not in (1, samples):
            raise ConfigError(
                message(
                    f"{name} has shape {tuple(value(node).shape)}, and the batch has {samples} "
                    "samples: pp cuts the first dim of what the model is given",
                    remedy="Give every tensor the batch as its first dim, or a first dim of 1.",
                )
            )
    return {node: S(0) for node, size in sizes.items() if size == samples > 1}, samples


def _microbatches(config: Config, samples: int, stages: int) -> int:
    asked = config.microbatches
    if asked is None:
        most = min(samples, IN_FLIGHT * stages)
        return next(n for n in range(most, 0, -1) if samples % n == 0)
    if samples % asked:
        divisors = [n for n in range(1, samples + 1) if samples % n == 0]
        raise ConfigError(
            message(
                f"a batch of {samples} samples does not divide into microbatches={asked}",
                remedy=f"Give options={{'microbatches': n}} one of {', '.join(map(str, divisors))},"
                " or another batch.",
            )
        )
    return asked


def refuse_options(config: Config) -> None:
    """Raise ConfigError for options that a mesh with pp does not obey."""
    asked = {
        "precision": config.precision is not None,
        "plan": config.plan is not None,
        "inner": config.inner == "tensorrt",
        "loss_tokens": config.loss_tokens != "local",
        "rng": config.rng == "tracker",
        "outputs": config.outputs != "lazy",
    }
    for name, is_asked in asked.items():
        if is_asked:
            raise ConfigError(
                message(
                    f"options['{name}']={getattr(config, name)!r} beside pp in the mesh is not "
                    "supported yet",
                    remedy=f"Leave {name} out, or pp.",
                )
            )
