"""Each rank of a pipeline within `memory_budget`: what its stages compute again, as counted.

In 1F1B stage i of p keeps the activations of min(m, p - i) micro-batches: early stages compute more
again than late ones. Each has the quickest choice with which its rank fits, so that no stage is
slower than it has to be. The cut has decided before which stage has which operators.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from autoshard.building.fitting import Bisection, counted_part, refuse_eager
from autoshard.building.pipeline.budget.stage_choices import RankChoices
from autoshard.building.pipeline.program import PipelineProgram
from autoshard.building.pipeline.stage_memory import StageCount
from autoshard.building.pipeline.stages import held_bytes
from autoshard.config import Config
from autoshard.errors import PlanError, message
from autoshard.memory import StageMemory
from autoshard.planning import Recomputation

_SAFE = 2
"""An estimate this many times below the budget needs no count."""


class StageTooLarge(PlanError):
    """A rank's stages do not fit a budget of `budget` bytes with all recomputed; they need
    `needed`."""

    def __init__(self, program: PipelineProgram, rank: int, needed: int, budget: int) -> None:
        self.needed = needed
        numbers = list(range(rank, len(program.plan.stages), program.ranks))
        named = f"stage {numbers[0]}" if len(numbers) == 1 else f"stages {_spell(numbers)}"
        micro = program.microbatch.microbatches
        super().__init__(
            message(
                f"{named} of {len(program.plan.stages)}, on rank {rank} of pp, "
                f"{'does' if len(numbers) == 1 else 'do'} not fit a memory budget of {budget:,} "
                "bytes: with all recomputed that can be, a step needs "
                f"{needed:,} bytes, {needed - budget:,} more, of which parameters, their gradients "
                f"and the optimizer's states have {resident(program, rank):,}",
                remedy=f"Raise the budget to {needed:,}, or use a smaller batch, more micro-batches"
                f" than {micro}, or more ranks.",
            )
        )


def fit_stages(program: PipelineProgram, ranks: Iterable[int], config: Config) -> None:
    """Decide what the stages of some ranks compute again, under the options' budget.

    Raises StageTooLarge where ranks do not fit whatever is computed again, of the one that needs
    most, and ConfigError where the inner compiler computes nothing again.
    """
    if config.memory_budget is None or program.microbatch.loss is None:
        return
    failed: list[StageTooLarge] = []
    for rank in ranks:
        if _SAFE * sum(program.plan.cut.memory[rank :: program.ranks]) > config.memory_budget:
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
    steps = choices.estimates
    search = Bisection(steps, free - steps[0], choices.cheapest, lambda i: count(choices.at(i)))
    found = search.run(room)
    if found is None:
        least = min(free, search.peak(len(steps) - 1))
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


def _spell(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:-1])) + f" and {numbers[-1]}"
