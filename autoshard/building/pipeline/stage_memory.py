"""The bytes a rank holds of one of its stages: the stage's graphs, counted.

Each rank of a pipeline within `memory_budget`: what its stages compute again, as counted.

In 1F1B stage i of p keeps the activations of min(m, p - i) micro-batches: early stages compute more
again than late ones. Each has the quickest choice with which its rank fits, so that no stage is
slower than it has to be. The cut has decided before which stage has which operators.

The values of a stage are those of the planned micro-batch that its operators make: what it receives
is kept anyway. Of each it keeps as many micro-batches as the schedule has under way, and computes
again for one at a time.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from autoshard.building.fitting import SAFE, Bisection, counted_part, refuse_eager
from autoshard.building.pipeline.program import PipelineProgram
from autoshard.building.pipeline.stage_graphs import adding_up, graded_parameters
from autoshard.building.pipeline.stages import BACKWARD, held_bytes, stored_dtype, sum_dtype
from autoshard.compiling import add_at_once, cut_backward, off_meta
from autoshard.config import Config
from autoshard.errors import PlanError
from autoshard.memory import StageMemory, memory_of_split_stage, memory_of_stage
from autoshard.passes import after_cut, set_fate
from autoshard.planning import (
    JoinedChoices,
    Recomputation,
    planned_value,
    tensor_bytes,
    value,
    value_text,
)
from autoshard.planning.estimate import Frontier, RankValue, Training, Walk
from autoshard.runtime import compat
from autoshard.runtime.collectives import shard_dim
from autoshard.runtime.pipeline import most_kept


class StageCount:
    """What a rank holds of a stage in a training step, with any choice of what is computed again.

    AOTAutograd runs once for all of them.
    """

    def __init__(self, program: PipelineProgram, number: int) -> None:
        self.program, self.stage = program, program.plan.stages[number]
        self.chunk, self.rank = divmod(number, program.ranks)
        count = len(self.stage.parameters)
        graph = self.stage.training(program.microbatch)
        graded = graded_parameters(graph, count)
        dtypes = [sum_dtype(program.microbatch.parameters[i]) for i in self.stage.parameters]
        self.sums = {i: dtypes[i] for i in graded}
        self.split = program.schedule == "zb1"
        self.graph = graph if self.split else adding_up(graph, graded, dtypes)
        self.placeholders = self.graph.graph.find_nodes(op="placeholder")
        self.own = self.placeholders[:count]
        # on meta losses have no derivative
        self.given = off_meta(self.graph, compat.backend_fakes(list(self.placeholders)))
        self.joints: list[compat.JointGraph] = []
        self.free = compat.forward_backward(*self.given, after_cut, self.joints)
        self.counted: dict[Recomputation | None, StageMemory] = {}

    def __call__(self, chosen: Recomputation | None) -> StageMemory:
        """chosen: None: what the compiler likes."""
        if chosen not in self.counted:
            graphs = self.free
            if chosen is not None and self.joints:
                again: Recomputation = chosen
                graphs = self.joints[0].split(lambda node: set_fate(node, again))
            self.counted[chosen] = self._of(graphs)
        return self.counted[chosen]

    def _of(self, graphs: compat.ForwardBackward) -> StageMemory:
        micro, stage = self.program.microbatch, self.stage
        rows = self.placeholders[len(self.own) :][: len(stage.shared)]
        parts = [
            micro.microbatches if shard_dim(micro.shared[i][1]) is not None else 1
            for i in stage.shared
        ]
        parameters = gradients = 0
        for node in self.own:
            val, stored = value(node), stored_dtype(node)
            parameters += tensor_bytes(val) + val.numel() * stored.itemsize * (stored != val.dtype)
            gradients += val.numel() * sum_dtype(node).itemsize * val.requires_grad
        return (self._split if self.split else self._whole)(
            graphs,
            parameters=parameters,
            gradients=gradients,
            shared=self._outputs()
            + sum(tensor_bytes(value(node)) * n for node, n in zip(rows, parts)),
        )

    def _outputs(self) -> int:
        """Bytes of outputs of the whole batch that are there from their forwards on: those made
        here, and on every rank those whose gradients are awaited, once they are read, beside
        their gradients."""
        micro = self.program.microbatch
        made: Any = micro.local.graph.output_node().args[0]
        serial: Any = micro.serial.graph.output_node().args[0]
        awaited = micro.graded if micro.loss is None else ()
        here = [i for i in self.stage.returned(micro) if micro.positions[i] not in awaited]
        held = micro.microbatches * sum(
            tensor_bytes(value(made[i])) for i in here if micro.positions[i] != micro.loss
        )
        if self.chunk == 0:
            held += 2 * sum(tensor_bytes(value(serial[position])) for position in awaited)
        return held

    def _whole(self, graphs: compat.ForwardBackward, **resident: int) -> StageMemory:
        if graphs.backward is not None:
            add_at_once(graphs.backward)
        live = most_kept(self.program.schedule, self.program.shape, self.rank)[self.chunk]
        received = sum(tensor_bytes(value(node)) for node in self.stage.received)
        return memory_of_stage(graphs, len(self.own), received, live, **resident)

    def _split(self, graphs: compat.ForwardBackward, **resident: int) -> StageMemory:
        stage, given = self.stage, self.given
        cut = cut_backward(*given, self.sums, len(stage.reads), graphs)
        sizes = [tensor_bytes(value(node)) for node in stage.received]
        read = [sizes[i] for i in stage.reads]
        works = [a.work for a in self.program.actions(self.rank) if a.chunk == self.chunk]
        return memory_of_split_stage(cut, read, sum(sizes) - sum(read), works, **resident)


class StageTooLarge(PlanError):
    """A rank's stages do not fit a budget of `budget` bytes with all recomputed; they need
    `needed`."""

    def __init__(self, program: PipelineProgram, rank: int, needed: int, budget: int) -> None:
        self.needed = needed
        numbers = list(range(rank, len(program.plan.stages), program.ranks))
        first = ", ".join(map(str, numbers[:-1]))
        named = f"stage {numbers[0]}" if len(numbers) == 1 else f"stages {first} and {numbers[-1]}"
        micro = program.microbatch.microbatches
        super().__init__(
            f"{named} of {len(program.plan.stages)}, on rank {rank} of pp, "
            f"{'does' if len(numbers) == 1 else 'do'} not fit a memory budget of {budget:,} "
            "bytes: with all recomputed that can be, a step needs "
            f"{needed:,} bytes, {needed - budget:,} more, of which parameters, their gradients "
            f"and the optimizer's states have {resident(program, rank):,}",
            remedy=f"Raise the budget to {needed:,}, or use a smaller batch, more micro-batches"
            f" than {micro}, or more ranks.",
        )


def fit_stages(program: PipelineProgram, ranks: Iterable[int], config: Config) -> None:
    """Decide what the stages of some ranks compute again, under the options' budget.

    Raises StageTooLarge where ranks do not fit whatever is computed again, of the one that needs
    most, and ConfigError where the inner compiler computes nothing again.
    """
    if config.memory_budget is None or not program.microbatch.graded:
        return
    failed: list[StageTooLarge] = []
    for rank in ranks:
        if SAFE * sum(program.plan.cut.memory[rank :: program.ranks]) > config.memory_budget:
            if config.inner == "eager":
                refuse_eager(config.memory_budget)
            try:
                program.recomputed.update(_chosen(program, rank, config))
            except StageTooLarge as error:
                failed.append(error)
    if failed:
        raise max(failed, key=lambda error: error.needed)


def lines_of_recomputation(program: PipelineProgram) -> list[str]:
    """What stages compute again, as lines to compare."""
    return [
        f"stage {number} computes again: {', '.join(sorted(one.again))}"
        for number, one in program.recomputed.items()
    ]


def _chosen(program: PipelineProgram, rank: int, config: Config) -> dict[int, Recomputation]:
    budget = config.memory_budget
    assert budget is not None
    part = counted_part(config.inner)
    room = int(budget * part) - resident(program, rank, config.optimizer_states == "host")
    numbers = range(rank, len(program.plan.stages), program.ranks)
    counts = {number: StageCount(program, number) for number in numbers}

    def count(chosen: Mapping[int, Recomputation]) -> int:
        return together([one(chosen.get(number)) for number, one in counts.items()])

    free = count({})
    if free <= room:
        return {}
    choices = RankChoices(program, rank)
    more, last = free - choices.estimates[0], len(choices.steps) - 1
    search = Bisection(choices, more, lambda i: count(choices.at(i)))
    found = search.run(room)
    if found is None:
        least = min(free, search.peak(last))
        raise StageTooLarge(
            program, rank, math.ceil((budget * part - room + least) / part) + 1, budget
        )
    return choices.at(found)


def together(stages: Sequence[StageMemory]) -> int:
    """The most bytes of all activations of a rank's stages, one of which is at work."""
    waiting = [one.live * one.kept + one.waiting * one.late for one in stages]
    others = [sum(waiting) - own for own in waiting]
    return max(one.together + other for one, other in zip(stages, others)) + sum(
        one.shared for one in stages
    )


def resident(program: PipelineProgram, rank: int, host: bool = False) -> int:
    """Bytes that a rank holds in a call whatever its stages keep: parameters, their gradients and
    the optimizer's states. host: whether those are there."""
    micro, stages = program.microbatch, program.plan.stages[rank :: program.ranks]
    placeholders = micro.local.graph.find_nodes(op="placeholder")
    read = sorted({i for stage in stages for i in stage.parameters})
    found = 0.0
    for i in read:
        home = program.plan.homes[i] == rank
        axes = program.split_over(i)
        found += held_bytes(placeholders[i], axes, states=0 if host else 2, home=home)
    return math.ceil(found)


class RankChoices(JoinedChoices):
    """The choices of a rank's stages together."""

    def __init__(self, program: PipelineProgram, rank: int) -> None:
        numbers = range(rank, len(program.plan.stages), program.ranks)
        live = most_kept(program.schedule, program.shape, rank)
        values = stage_values(program, numbers)
        parts = [
            Frontier(own, several=count > 1).keeping(count) for own, count in zip(values, live)
        ]
        super().__init__(parts)
        self.numbers = [number for number, part in zip(numbers, parts) if part.points]
        # the cut counts operators without the efficiencies by which those of values are priced
        forward = {n: sum(v.seconds for v in own) for n, own in zip(numbers, values)}
        own_seconds = program.plan.stage_seconds
        self.scales = [own_seconds[n] / (1 + BACKWARD) / (forward[n] or 1.0) for n in self.numbers]

    def at(self, index: int) -> dict[int, Recomputation]:
        """The choices of a step, by the stage's number, with seconds as those of stages."""
        chosen = zip(self.numbers, self.recomputations(index), self.scales)
        return {n: replace(one, seconds=scale * one.seconds) for n, one, scale in chosen}


def stage_values(program: PipelineProgram, numbers: Sequence[int]) -> list[list[RankValue]]:
    """The values that each of some stages makes."""
    planned = program.microbatch.planned
    assert planned is not None  # under a budget
    nodes, decisions = planned.graph.graph.nodes, planned.decisions
    walk = Walk(planned.graph, decisions, planned.n, decisions.machine, Training())
    found = []
    for number in numbers:
        graph = program.plan.stages[number].graph.graph
        texts = set(map(planned_value, graph.nodes)) - {""}
        names = {text.partition(" ")[0] for text in texts}
        made = walk.of(node for node in nodes if node.name in names)
        found.append(_only(made, [value_text(one.key) in texts for one in made]))
    return found


def _only(values: Sequence[RankValue], inside: Sequence[bool]) -> list[RankValue]:
    """Some of the values: a change of state may lie on the other side of a cut."""
    places = {i: place for place, i in enumerate(i for i, own in enumerate(inside) if own)}
    return [
        replace(values[i], sources=tuple(places[s] for s in values[i].sources if s in places))
        for i in places
    ]
