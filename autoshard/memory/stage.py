"""The bytes a rank holds while it runs one stage of a pipeline, from the stage's graphs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from autoshard.memory.phases import phases
from autoshard.memory.step import Step
from autoshard.planning import tensor_bytes
from autoshard.runtime.compat import ForwardBackward


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """parameters, gradients: of what the stage reads, gradients as they add up over micro-batches.
    shared: of the whole batch, values that are made of no parameter. kept: of one micro-batch from
    its forward to its backward; live: the most micro-batches of which it is. late, waiting: the
    same from the first part of a backward to the second, where it has two. together: the most that
    all micro-batches have at once, with what the one at work makes and frees.
    """

    parameters: int
    gradients: int
    shared: int
    kept: int
    live: int
    together: int
    late: int = 0
    waiting: int = 0

    @property
    def peak(self) -> int:
        """The most of all together, in a call; the optimizer's state is beside it."""
        return self.parameters + self.gradients + self.shared + self.together


def memory_of_stage(
    graphs: ForwardBackward,
    parameters: Sequence[torch.Tensor],
    received: int,
    live: int,
    shared: int,
) -> StageMemory:
    """What a stage holds. graphs: of one micro-batch, run operator by operator, whose first inputs
    are `parameters`. received: bytes of a micro-batch from the stage before.
    """
    trained = sum(tensor_bytes(each) for each in parameters if each.requires_grad)
    made = phases(graphs, range(len(parameters)), held=True)  # autograd's caller has them
    step = Step(phases=made, resident={}, gradients=trained, scratch=0)
    moments = [each for each in step.moments() if each.phase != "optimizer"]
    most, kept = max(each.bytes for each in moments), received + step.activations
    return StageMemory(
        parameters=sum(map(tensor_bytes, parameters)),
        gradients=trained,
        shared=shared,
        kept=kept,
        live=live,
        together=(live - 1) * kept + received + most,
    )
