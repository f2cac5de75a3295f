"""The loss of a call whose gradients are there before it is weighed, and outputs of one whose
gradients are awaited."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from autoshard.runtime import compat
from autoshard.runtime.collectives import Axis, run_ranks
from autoshard.runtime.errors import AutoshardError
from autoshard.runtime.lazy_gather import LazyGather
from autoshard.runtime.lazy_parts import FetchedWhole
from autoshard.runtime.pipeline import awaiting_gradients, step_loss
from autoshard.runtime.pipeline.execution import RankPipeline


@pytest.mark.parametrize("weights", [(3.0, 3.0), (1.0, 3.0)])
def test_ranks_whose_rows_meet_weigh_their_losses_alike(weights: tuple[float, float]) -> None:
    def one(axis: Axis) -> str:
        parameter = torch.ones(2, requires_grad=True)
        loss = step_loss(torch.ones(()), [torch.ones(2)], [parameter], axis)
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


class Fetched:
    """An output of two numbers, and how often it was fetched."""

    def __init__(self) -> None:
        self.times = 0
        value = FetchedWhole(torch.empty(()), Axis("pp", 2, 0, ""), self.fetch)
        self.output = LazyGather(value, (2,), False)

    def fetch(self) -> torch.Tensor:
        self.times += 1
        return torch.tensor([1.0, 2.0])


def test_an_output_is_fetched_where_it_is_read_first_and_once() -> None:
    made = Fetched()
    copies = [made.output.detach(), made.output.clone(), made.output.double()]
    assert copies[-1].dtype == torch.float64 and made.output.shape == (2,)
    assert "pp" in repr(made.output) and made.times == 0
    assert [float(each.sum()) for each in [*copies, made.output]] == [3.0] * 4
    assert made.times == 1


def test_copies_that_nobody_has_read_keep_what_they_copied() -> None:
    """Whatever is written to first: the output, a copy of it, or neither."""

    def written(output: torch.Tensor) -> list[list[float]]:
        first, wide = output.clone(), output.double()
        second = wide.clone()
        wide.mul_(3)
        output.add_(5)
        late = output.clone()
        late.zero_()
        return [each.tolist() for each in (output, first, wide, second, late)]

    made = Fetched()
    with torch.no_grad():
        assert written(made.output) == written(torch.tensor([1.0, 2.0])) and made.times == 1


def test_gradients_that_arrive_run_the_backward_once() -> None:
    read, unread, seen = Fetched(), Fetched(), list[Mapping[int, torch.Tensor]]()
    parameter, frozen = torch.ones(2, requires_grad=True), torch.ones(2)

    def backward(arrived: Mapping[int, torch.Tensor]) -> list[torch.Tensor | None]:
        seen.append(arrived)
        return [3 * arrived[0], None]

    outputs = awaiting_gradients(
        {0: read.output, 2: unread.output}, backward, contextlib.nullcontext, [parameter, frozen]
    )
    loss = outputs[0].float().square().sum()
    loss.backward(retain_graph=True)
    assert parameter.grad is not None and parameter.grad.tolist() == [6.0, 12.0]
    assert [list(each) for each in seen] == [[0]] and unread.times == 0
    with pytest.raises(AutoshardError, match="a second backward"):
        loss.backward()
    again = awaiting_gradients({0: read.output}, backward, contextlib.nullcontext, [parameter])
    with pytest.raises(AutoshardError, match="second derivative"):
        torch.autograd.grad(again[0].square().sum(), parameter, create_graph=True)
