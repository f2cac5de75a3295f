"""The loss of a call whose gradients are there before it is weighed."""

from __future__ import annotations

import pytest
import torch

from autoshard.runtime.collectives import Axis, run_ranks
from autoshard.runtime.errors import AutoshardError
from autoshard.runtime.pipeline import step_loss


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
