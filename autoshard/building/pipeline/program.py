"""A pipeline of one graph: captured, its batch and its operators cut. Starts no process."""

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx, nn
from torch.distributed.tensor import DTensor

from autoshard.building.batch_check import batch_inputs
from autoshard.building.local_passes import serial_passes
from autoshard.building.pipeline.batch_split import with_rows
from autoshard.building.pipeline.inner_axes import split_operators
from autoshard.building.pipeline.microbatch import (
    MicrobatchGraph,
    cut_batch,
    with_kept_outputs,
    with_sums,
)
from autoshard.building.pipeline.stages import StagePlan, followed, plan_stages, with_stages
from autoshard.building.planned import choices_made, layout_of, refuse_twice
from autoshard.capture import capture
from autoshard.compiling import EQUAL_LAYERS, DebugWatch, settings
from autoshard.config import Config
from autoshard.errors import CaptureError, ConfigError
from autoshard.parameters import lowered_dtypes, say_stored
from autoshard.passes import prepare
from autoshard.planning import (
    PipelinePlan,
    Plan,
    Recomputation,
    fingerprint,
    is_trained,
    value,
)
from autoshard.planning.cost import Cluster
from autoshard.runtime import compat
from autoshard.runtime.collectives import (
    CHOICES,
    WHOLE,
    Axis,
    H,
    I,
    S,
    State,
    data_axes,
    gathering_axes,
    home_rank,
)
from autoshard.runtime.graph_meta import BUFFER, DIFF, GIVEN
from autoshard.runtime.mesh import Mesh
from autoshard.runtime.operators import rows_travel
from autoshard.runtime.parameters import is_eager_value, is_planned, stored_states
from autoshard.runtime.pipeline import (
    SCHEDULES,
    Action,
    ScheduleShape,
    Timeline,
    is_possible,
    most_kept,
    picture,
    timeline,
)

IN_FLIGHT = 4
"""Micro-batches a stage, where the number is not given: the pipeline then waits for a fifth."""

KEPT_BYTES = 2**30
"""Of outputs beside a loss a rank keeps no more in training, and under a budget a 50th of it."""


@dataclass(kw_only=True)
class PipelineProgram:
    """What `pp` made of a graph: the same on all ranks.

    parameters: the name of each by its placeholder in the serial graph; those of `given` are inputs
    with a gradient, which every rank has whole. schedule: its name; asked:
    that of the options, which is another where backwards await the gradients of outputs. ranks:
    those of pp, which stages take in turn. shards: by axis, ranks among which parameters are split
    between calls. recomputed: what stages compute again in backward, by their number, where the
    budget asks for it. joins: whether the batch is one micro-batch as the model joins samples.
    """

    microbatch: MicrobatchGraph
    plan: StagePlan
    parameters: Mapping[fx.Node, str]
    schedule: str
    asked: str
    ranks: int
    saved: Plan
    shards: Mapping[str, int] = field(default_factory=dict)
    recomputed: dict[int, Recomputation] = field(default_factory=dict)
    joins: bool = False

    @property
    def given(self) -> list[fx.Node]:
        """The inputs with a gradient."""
        return [node for node in self.parameters if GIVEN in node.meta]

    @property
    def named(self) -> dict[fx.Node, str]:
        """The names of the model's own parameters."""
        return _named(self.parameters)

    @property
    def shape(self) -> ScheduleShape:
        """What the schedule is made for."""
        chunks = len(self.plan.stages) // self.ranks
        return ScheduleShape(self.ranks, self.microbatch.microbatches, chunks)

    def actions(self, rank: int) -> list[Action]:
        """The order of a rank's work."""
        return SCHEDULES[self.schedule](rank, self.shape)

    def name_of(self, action: Action) -> str:
        """What pictures call an action: with a letter, where ranks have several stages."""
        return f"{action}{chr(ord('a') + action.chunk) if self.shape.chunks > 1 else ''}"

    def readers(self, parameter: int) -> list[int]:
        """The ranks that read a parameter of the micro-batch's graph."""
        numbered = enumerate(self.plan.stages)
        return sorted({n % self.ranks for n, stage in numbered if parameter in stage.parameters})

    def stored(self) -> dict[fx.Node, State]:
        """The state on pp in which each parameter is stored: at home on the first stage that reads
        it; a scalar on all, and what is given; one that no output depends on, on the first."""
        homes = dict(zip(self.microbatch.parameters, self.plan.homes))
        at_home = {n for n in self.named if value(n).dim()}
        return {n: H(homes.get(n, 0)) if n in at_home else I for n in self.parameters}

    def placed(self) -> dict[fx.Node, tuple[dict[str, State], str]]:
        """The states of `stored`, and those on tp where the mesh has it, and what dp_shard does, or
        "" where that was not chosen."""
        split, choices = self.microbatch.split, self.microbatch.choices
        return {
            n: ({"pp": at, "tp": split.get(n, I)}, choices.get(n, ""))
            for n, at in self.stored().items()
        }

    def timeline(self, equal: bool = False) -> Timeline:
        """When each rank does what, as the search prices stages. equal: if they all took as
        long."""
        forward = [1.0 if equal else seconds / 3 for seconds in self.plan.stage_seconds]
        backward = [2 * seconds for seconds in forward]
        if not equal:
            for number, one in self.recomputed.items():
                backward[number] += one.seconds
        count, chunks = self.shape.microbatches, self.shape.chunks
        return timeline(self.schedule, count, forward, backward, chunks)

    def split_over(self, parameter: int) -> Mapping[str, int]:
        """By axis, the ranks among which a parameter of the micro-batch's graph is split."""
        whole = self.microbatch.choices.get(self.microbatch.parameters[parameter]) == WHOLE
        return {name: n for name, n in self.shards.items() if not whole or name != "dp_shard"}

    def stage_seconds(self, number: int) -> float:
        """Of a micro-batch on a stage, what it computes again included."""
        again = self.recomputed.get(number)
        return self.plan.stage_seconds[number] + (again.seconds if again else 0.0)

    def idle(self, equal: bool = False) -> float:
        """The part of a step that ranks wait; see `timeline`."""
        return self.timeline(equal).idle

    def exchanges(self) -> str:
        """What ranks of ep, whose batches may differ, do together in a call."""
        travel = [sum(map(bool, map(rows_travel, s.graph.graph.nodes))) for s in self.plan.stages]
        count = self.microbatch.microbatches
        return f"{self.schedule}, {count} micro-batches, mixtures of the stages {travel}"

    def lines(self) -> list[str]:
        """The pipeline as text, one line a stage, and the plan on tp; what ranks compare."""
        return [*self.stage_lines(), *self.microbatch.plan]

    def stage_lines(self) -> list[str]:
        """One line for the schedule, and one for each stage."""
        plan, m = self.plan, self.microbatch.microbatches
        other = f" and not {self.asked}, as {OUTSIDE}" if self.asked != self.schedule else ""
        count = "one micro-batch, as samples are joined," if self.joins else f"{m} micro-batches"
        found = [
            f"schedule {self.schedule}{other}, {count} on {len(plan.stages)} stages, "
            f"idle {self.idle():.0%} of a step, {self.idle(equal=True):.0%} if stages took equally "
            "long"
        ]
        for number, stage in enumerate(plan.stages):
            names = [self.parameters[self.microbatch.parameters[i]] for i in stage.parameters]
            sends = ", ".join(f"{n.name} {tuple(value(n).shape)}" for n in stage.sent) or "nothing"
            found.append(f"stage {number}: reads {', '.join(names)}; sends {sends}")
        chosen = self.microbatch.choices
        for choice in CHOICES:
            own = [name for node, name in self.parameters.items() if chosen.get(node) == choice]
            if own:
                found.append(f"{choice} on dp_shard: {', '.join(own)}")
        return found

    def picture(self) -> str:
        """The schedule as text, where stages take equally long."""
        return picture(self.schedule, *self.shape)


def build_pipeline(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    inputs: Sequence[compat.GraphInput],
    ranks: int,
    config: Config,
    cluster: Cluster,
    beside: Sequence[Axis] = (),
) -> PipelineProgram:
    """Capture Dynamo's graph, and cut it. Raises CaptureError, ConfigError and PlanError, on all
    ranks alike.

    beside: the other axes of the mesh: on cp, dp_shard and ep a stage's parameters are split
    between calls, on cp and tp its operators.
    """
    config.refuse({**Mesh(tuple(beside), None).sizes, "pp": ranks})
    config, asked = followed(config, Mesh(tuple(beside), None), ranks)
    pipeline = asked.pipeline if asked is not None else None
    known = all(is_planned(i.real) for i in inputs if isinstance(i.real, nn.Parameter))
    dtypes, every = lowered_dtypes(list(inputs)), EQUAL_LAYERS in settings().left_out
    serial = capture(gm, example_inputs, dtypes, inference=known, whole=every)
    say_stored(serial, list(inputs), config)
    passes = serial_passes(
        {} if config.recover_masks else None,
        exchanges=True,
        sequences=any(axis.name == "cp" and axis.size > 1 for axis in beside),
        microbatches=True,
    )
    watch = DebugWatch(settings(), beside)
    prepare(serial, Axis("tp", 1, 0, ""), passes, watch)
    nodes = serial.graph.find_nodes(op="placeholder")
    parameters: dict[fx.Node, str] = {}
    stored: dict[fx.Node, int] = {}
    split: dict[fx.Node, State] = {}
    for node, item in zip(nodes, inputs, strict=True):
        if isinstance(item.real, nn.Parameter):
            parameters[node] = item.name
            if isinstance(item.real, DTensor) and is_planned(item.real):
                states = stored_states(item.real)
                split[node] = states.get("tp", I)
                home = home_rank(states.get("pp", I))
                if home is not None:
                    stored[node] = home
        elif node.meta.get(DIFF):
            parameters[node], split[node] = item.name, I
            node.meta[GIVEN] = True
        elif item.of_model:
            node.meta[BUFFER] = True
    batch, samples = _batch(nodes, inputs)
    for node in parameters:
        if GIVEN in node.meta and node in batch:
            batch[with_rows(serial, node, samples)] = batch.pop(node)
    schedule, chunks = config.order
    shape = ScheduleShape(ranks, _microbatches(config, samples, ranks, pipeline), chunks)
    joins = False
    counted = data_axes(beside) if config.loss_tokens == "global" else ()
    with_sums(serial, _named(parameters), counted)
    try:
        microbatch = cut_batch(serial, parameters, batch, shape.microbatches, watch)
    except CaptureError as error:
        whole = shape._replace(microbatches=1)
        free = config.microbatches is None and pipeline is None
        if not free or whole == shape or not is_possible(schedule, whole):
            raise
        shape, joins = whole, True
        microbatch = cut_batch(serial, parameters, batch, 1, watch)
        warnings.warn(f"{ONE_BY_ONE}: {error}", stacklevel=2)
    if schedule == "gpipe":  # there the backwards of a loss may wait, too
        microbatch = replace(microbatch, loss=None)
    asked_schedule, schedule = schedule, _possible(schedule, microbatch)
    layout = layout_of(config, Mesh(tuple(beside), None), asked, is_trained(serial))
    chosen = choices_made(nodes, inputs, layout) if layout.chooses else {}
    refuse_twice(asked, layout)
    machine = cluster.on({**Mesh(tuple(beside), None).sizes, "pp": ranks})
    microbatch, made = split_operators(
        microbatch, parameters, split, beside, machine, config, layout, asked, chosen, watch
    )
    budget = config.memory_budget
    if microbatch.loss is not None:
        limit = KEPT_BYTES if budget is None else min(KEPT_BYTES, budget // 50)
        microbatch = with_kept_outputs(microbatch, limit)
    live = [most_kept(schedule, shape, rank) for rank in range(ranks)]
    shards = {axis.name: axis.size for axis in gathering_axes(beside)}
    shards.pop("dp_replicate", None)
    named = _named(parameters)
    homes, cuts = stored, None
    if pipeline is not None:
        said = {
            node: pipeline.homes[name] for node, name in named.items() if name in pipeline.homes
        }
        homes, cuts = {**said, **stored}, pipeline.graphs.get(fingerprint(microbatch.local))
    plan = plan_stages(microbatch, live, machine, homes, budget, shards, cuts, watch)
    return PipelineProgram(
        microbatch=microbatch,
        plan=plan,
        parameters=parameters,
        schedule=schedule,
        asked=asked_schedule,
        ranks=ranks,
        saved=with_stages(made, plan, microbatch, named, asked_schedule, shape),
        shards=shards,
        joins=joins,
    )


ONE_BY_ONE = (
    "pp runs each batch whole, one stage after the other, as if pipeline.microbatches were 1"
)

OUTSIDE = "the model returns no one scalar loss, and backwards wait for gradients of its outputs"


def _possible(schedule: str, microbatch: MicrobatchGraph) -> str:
    """The schedule that a graph can have: backwards that wait for gradients are after all
    forwards."""
    if schedule == "gpipe" or microbatch.loss is not None or not microbatch.graded:
        return schedule
    warnings.warn(
        f"pp runs all forwards of a step, then all backwards (schedule gpipe and not {schedule}): "
        f"{OUTSIDE}. Each stage keeps the activations of all {microbatch.microbatches} "
        "micro-batches. Compute one loss in the compiled model to have the other schedules, or "
        'give {"pipeline": {"schedule": "gpipe"}}',
        stacklevel=2,
    )
    return "gpipe"


def _named(parameters: Mapping[fx.Node, str]) -> dict[fx.Node, str]:
    return {node: name for node, name in parameters.items() if GIVEN not in node.meta}


def _batch(
    nodes: Sequence[fx.Node], inputs: Sequence[compat.GraphInput]
) -> tuple[dict[fx.Node, State], int]:
    """The inputs with a dim for samples, the first, and how many samples there are: as many as
    the inputs of most dims have, of those most, and of these the first. Others are whole (a mask of
    positions, lengths of packed sequences), and rules say whether they may be. One with a gradient
    and other rows than those without is whole, as parameters are: an earlier graph made it of them
    (a step of MAML, a weight that is scaled)."""
    given = [
        nodes[i.position]
        for i in batch_inputs(inputs)
        if not is_eager_value(inputs[i.position].real)
    ]
    sizes = {node: int(value(node).shape[0]) for node in given if value(node).dim()}
    plain = [node for node, size in sizes.items() if size > 1 and not node.meta.get(DIFF)]
    dims = max((value(node).dim() for node in plain), default=0)
    made = {node for node in sizes if node.meta.get(DIFF) and value(node).dim() <= dims}
    asked = {node: size for node, size in sizes.items() if node not in made and size > 1}
    votes = Counter(asked.values())
    first = max(asked, key=lambda n: (value(n).dim(), votes[asked[n]]), default=None)
    samples = 1 if first is None else asked[first]
    return {node: S(0) for node, size in sizes.items() if size == samples > 1}, samples


def _microbatches(config: Config, samples: int, ranks: int, plan: PipelinePlan | None) -> int:
    asked, (schedule, _) = config.microbatches, config.order
    divisors = [
        n
        for n in range(1, samples + 1)
        if samples % n == 0 and is_possible(schedule, ScheduleShape(ranks, n))
    ]
    if plan is not None and plan.microbatches in divisors:
        return plan.microbatches
    if asked is None:
        return max(n for n in divisors if n <= max(1, IN_FLIGHT * ranks))
    if asked not in divisors:
        raise ConfigError(
            f"a batch of {samples} samples does not divide into microbatches={asked}"
            + (f" for schedule={schedule!r}" if samples % asked == 0 else ""),
            remedy="Give options={'pipeline': {'microbatches': n}} one of "
            f"{', '.join(map(str, divisors))}, or another batch.",
        )
    return asked
