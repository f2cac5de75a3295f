"""The loss of a call whose gradients are there before it is weighed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from autoshard.runtime import compat
from autoshard.runtime.collectives import Axis, run_ranks
from autoshard.runtime.errors import AutoshardError
from autoshard.runtime.pipeline import step_loss
from autoshard.runtime.pipeline.execution import RankPipeline


@pytest.mark.parametrize("weights", [(3.0, 3.0), (1.0, 3.0)])
def test_ranks_whose_rows_meet_weigh_their_losses_alike(weights: tuple[float, float]) -> None:
    def one(axis: Axis) -> str:
        parameter = torch.ones(2, requires_grad=True)
        loss = step_loss(lambda: (torch.ones(()), [torch.ones(2)]), [parameter], axis)
        try:
            (loss * weights[axis.rank]).backward()
        except AutoshardError as error:
            return str(error)
        assert parameter.grad is not None and parameter.grad.tolist() == [3.0, 3.0]
        return ""

    first, second = run_ranks(2, one)
    assert first == second
    assert ("weigh their losses differently (1, 3)" in first) == (len(set(weights)) == 2)


@pytest.mark.parametrize("grads", [(1.0, 2.0), (1.0, None), (None, 2.0)])
def test_a_parameter_of_two_stages_of_a_rank_has_the_gradients_of_both(grads: Any) -> None:
    """Of one rank, whose stages tie a weight."""
    parameter = torch.ones(2, requires_grad=True)
    runs: Any = [SimpleNamespace(gradients=[g and torch.full((2,), g)]) for g in grads]
    stage: Any = SimpleNamespace(parameters=[0])
    pipeline = RankPipeline(
        axis=Axis("pp", 1, 0, ""),
        stages=[stage, stage],
        actions=[],
        microbatches=1,
        homes=[0],
        sums=[torch.float32],
        loans=[],
        shared=lambda *inputs: inputs,
        dims=[],
        results=[],
        loss=None,
        graded=torch.ones(1),
    )
    with mock.patch.object(compat, "process_group", lambda name: None):
        (found,) = pipeline._gradients(mock.Mock(), [parameter], runs)
    assert found is not None and found.tolist() == [sum(g or 0.0 for g in grads)] * 2
