"""Ranks that differ, fail or are absent: every rank ends with an error, and soon."""

from __future__ import annotations

import os
import time
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from autoshard.runtime.agreement.store_exchange import StoreExchange
from models_plain import MLP, Regression, vectors

LIMIT = 60.0  # what the pool would report as a hang comes long after


def caught(call: Any) -> tuple[str, str]:
    """(class, text) of what a call raises, as a user would catch it."""
    from autoshard.runtime import compat

    try:
        call()
    except Exception as error:
        cause = compat.backend_error(error) or error
        return type(cause).__name__, str(cause)
    return "", "nothing was raised"


def compiled(**options: Any) -> Any:
    torch.manual_seed(0)
    settings = {"inner": "eager", "mesh": {"tp": 2}, "timeout": LIMIT, **options}
    return torch.compile(Regression(MLP()), backend="autoshard", options=settings)


def mine(rank: int) -> bool:
    return int(os.environ["RANK"]) == rank


def options_of_one(rank: int, options: dict[str, Any]) -> tuple[str, str]:
    return caught(lambda: compiled(**(options if mine(rank) else {}))(**vectors(0)))


def both(gloo2: Any, *args: Any) -> list[tuple[str, str]]:
    """What a function raises on each rank; no rank waited for its time limit."""
    started = time.monotonic()
    results: list[tuple[str, str]] = gloo2(*args)
    assert time.monotonic() - started < LIMIT, "a rank waited for the time limit"
    assert all(kind for kind, _ in results), results
    return results


@pytest.mark.parametrize(
    ("options", "own", "other"),
    [
        ({"meshh": 1}, "unknown autoshard option 'meshh'", "rank 1: ConfigError: unknown"),
        ({"mesh": {"tp": 4}}, "needs 4 processes", "rank 1: ConfigError: the mesh tp 4"),
        ({"outputs": "replicate"}, "option outputs: 'lazy'", "rank 1: option outputs: 'repl"),
        (
            {"planner": {"sequence_parallel": False}},
            "option planner.sequence_parallel",
            "rank 1: option planner.seq",
        ),
        ({"memory": {"budget": 10}}, "memory budget of 10", "rank 1: PlanError"),
    ],
)
def test_options_of_one_rank(gloo2: Any, options: dict[str, Any], own: str, other: str) -> None:
    results = both(gloo2, options_of_one, 1, options)
    assert own in results[1][1] and other in results[0][1], results


def test_another_mesh_on_one_rank(gloo2: Any) -> None:
    """The first rank knows its mesh already, the second makes one, with the whole world."""
    assert gloo2(options_of_one, 0, {}) == [("", "nothing was raised")] * 2
    for kind, text in both(gloo2, options_of_one, 1, {"mesh": {"dp_replicate": 1, "dp_shard": 2}}):
        assert kind == "PlanMismatchError" and "at different things" in text, text
        assert "rank 0: plan" in text and "rank 1: mesh" in text, text


def fails_in(stage: str, rank: int) -> tuple[str, str]:
    from autoshard import backend
    from autoshard.building import one_rank as build

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise ZeroDivisionError(f"a fault of the {stage}")

    place = {
        "capture": (build, "capture"),
        "inner": (backend, "compile_local"),
        "store": (backend, "store"),
    }[stage]
    honest = getattr(*place)
    if mine(rank):
        setattr(*place, broken)
    try:
        return caught(lambda: compiled()(**vectors(0)))
    finally:
        setattr(*place, honest)


@pytest.mark.parametrize("stage", ["capture", "store", "inner"])
def test_a_rank_fails_while_it_compiles(gloo2: Any, stage: str) -> None:
    rank = int(stage == "store")
    results = both(gloo2, fails_in, stage, rank)
    assert results[rank] == ("ZeroDivisionError", f"a fault of the {stage}")
    kind, text = results[1 - rank]
    assert kind == "PlanMismatchError"
    assert f"rank {rank}: ZeroDivisionError: a fault of the {stage}" in text


class Scaled(nn.Module):
    """A model whose graph holds a constant."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.body, self.factor = MLP(), factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.body(x) * self.factor).sum()


def differs(what: str) -> tuple[str, str]:
    torch.manual_seed(0)
    model: Any = Scaled(2.0 if what == "constant" and mine(1) else 1.0)
    if what == "dtype" and mine(1):
        model = model.double()
    options = {"inner": "eager", "mesh": {"tp": 2}, "timeout": LIMIT}
    step = torch.compile(model, backend="autoshard", options=options)
    x = torch.ones(4, 6 if what == "length" and mine(1) else 8, 64)
    return caught(lambda: step(x.double() if what == "dtype" and mine(1) else x))


@pytest.mark.parametrize(
    ("what", "texts"),
    [
        ("constant", ["2.0", "1.0"]),
        ("dtype", ["torch.float64", "torch.float32"]),
        ("length", ["(4, 8, 64)", "(4, 6, 64)"]),
    ],
)
def test_ranks_with_different_graphs(gloo2: Any, what: str, texts: list[str]) -> None:
    for kind, text in both(gloo2, differs, what):
        assert kind == "PlanMismatchError" and "axis tp disagree on the plan" in text
        assert all(each in text for each in texts), text


def batches(steps: list[list[list[int]]], **options: Any) -> tuple[str, str]:
    """Calls with x of a shape and a seed: steps[rank] is a list of [rows, seed]."""
    step = compiled(**options)
    for rows, seed in steps[int(os.environ["RANK"])]:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(rows, 8, 64, generator=generator)
        kind, text = caught(lambda x=x: step(x=x, y=torch.zeros_like(x)))
        if kind:
            return kind, text
    return "", "nothing was raised"


@pytest.mark.parametrize(
    ("first", "second", "texts"),
    [
        # another batch at the first call, and at the second
        ([[4, 1]], [[4, 2]], ["axis tp disagree on the batch", "input 0 (x): float32 (4, 8, 64)"]),
        ([[4, 1], [4, 2]], [[4, 1], [4, 3]], ["disagree on the batch", "input 0 (x)", "hash"]),
        # one rank compiles for a new length, the other has a graph for the old one
        (
            [[4, 1], [5, 1]],
            [[4, 1], [4, 1]],
            ["at different things", "plan (x (5, 8, 64)", "batch (call 2: x (4, 8, 64)"],
        ),
        # both have a graph for any length: its first call, and a later one
        ([[4, 1], [5, 1], [6, 1]], [[4, 1], [5, 1], [7, 1]], ["(6, 8, 64)", "(7, 8, 64)"]),
        (
            [[4, 1], [5, 1], [6, 1], [7, 1], [8, 1]],
            [[4, 1], [5, 1], [6, 1], [7, 1], [9, 1]],
            ["disagree on the batch", "(8, 8, 64)", "(9, 8, 64)"],
        ),
    ],
)
def test_batches_that_differ(
    gloo2: Any, first: list[list[int]], second: list[list[int]], texts: list[str]
) -> None:
    results = both(gloo2, batches, [first, second])
    for _, text in results:
        assert all(each in text for each in texts), text
    assert {kind for kind, _ in results} <= {"BatchMismatchError", "PlanMismatchError"}


def test_which_calls_are_checked(gloo2: Any) -> None:
    same, late = [[4, 1], [4, 2], [4, 3]], [[4, 1], [4, 2], [4, 9]]
    assert gloo2(batches, [same, late]) == [("", "nothing was raised")] * 2
    for kind, text in both(gloo2, always, [same, late]):
        assert kind == "BatchMismatchError" and "input 0 (x)" in text
    assert gloo2(never, [[[4, 1]], [[4, 2]]]) == [("", "nothing was raised")] * 2


def staged(steps: list[list[list[int]]]) -> tuple[str, str]:
    return batches(steps, mesh={"pp": 2}, inner="eager", pipeline={"microbatches": 2})


def test_stages_compare_their_batches(gloo2: Any) -> None:
    for kind, text in both(gloo2, staged, [[[4, 1]], [[4, 2]]]):
        assert kind == "BatchMismatchError" and "axis pp disagree on the batch" in text, text


def always(steps: list[list[list[int]]]) -> tuple[str, str]:
    return batches(steps, same_inputs={"batches": "always"})


def asked_when_always() -> list[str]:
    """What is asked of the store in six calls whose batches are all compared."""
    asked: list[str] = []
    exchange = StoreExchange.exchange

    def counted(self: StoreExchange, value: Any, what: str, *rest: Any, **more: Any) -> Any:
        asked.append(what)
        return exchange(self, value, what, *rest, **more)

    with mock.patch.object(StoreExchange, "exchange", counted):
        assert always([[[4, i] for i in range(6)]] * 2)[0] == ""
    return asked


def test_a_batch_that_is_compared_in_each_step_asks_nothing_of_the_store(gloo2: Any) -> None:
    for asked in gloo2(asked_when_always):
        assert asked.count("batch") == 2, asked


def never(steps: list[list[list[int]]]) -> tuple[str, str]:
    return batches(steps, same_inputs={"batches": "never"})


def absent(seconds: float) -> tuple[str, str]:
    """Rank 1 has a graph for its batch that is checked no more; rank 0 compiles another."""
    if mine(1):
        return "", ""
    return caught(lambda: compiled(timeout=seconds)(**vectors(0)))


def test_a_rank_that_does_not_come(gloo2: Any) -> None:
    results = gloo2(absent, 1.0)
    kind, text = results[0]
    assert kind == "PlanMismatchError", results
    assert "rank 1: did not arrive within 1 seconds" in text and "waited for it at the plan" in text


def after_a_failure() -> list[tuple[str, str]]:
    """What each of three compilations raises, of which rank 1 fails in the first."""
    options = [{"meshh": 1} if mine(1) else {}, {}, {}]
    return [options_of_one(int(os.environ["RANK"]), each) for each in options]


def test_after_a_failure_no_rank_goes_on(gloo2: Any) -> None:
    """A rank that caught the failure is not in step: it would enter other collectives."""
    story = "rank 1: ConfigError: unknown autoshard option 'meshh'"
    for own, *later in gloo2(after_a_failure):
        assert own[0] in ("ConfigError", "PlanMismatchError")
        assert all(kind == "PlanMismatchError" and story in text for kind, text in later), later
    assert gloo2(options_of_one, 0, {}) == [("", "nothing was raised")] * 2  # the next job


def broadcast(kind: str) -> dict[str, Any]:
    """Losses and gradients of both ranks, whose batches differ in all but their shapes."""
    torch.manual_seed(0)
    model = Regression(MLP())
    options = {"inner": "aot_eager", "mesh": {"tp": 2}, "same_inputs": {"batches": "broadcast"}}
    step = torch.compile(model, backend="autoshard", options=options)
    losses, grads = [], []
    for number in range(3):
        batch = vectors(10 * number + int(os.environ["RANK"]))
        x = batch["x"].transpose(0, 1).contiguous().transpose(0, 1).requires_grad_(kind == "leaf")
        before = x.detach().clone()
        loss = step(x=x, y=batch["y"])
        loss.backward()
        assert torch.equal(x, before), "the caller's batch was written to"
        losses.append(loss.item())
        grads.append(None if x.grad is None else x.grad)
    return {"losses": losses, "grads": grads}


@pytest.mark.parametrize("kind", ["plain", "leaf"])
def test_broadcast_inputs(gloo2: Any, kind: str) -> None:
    results = gloo2(broadcast, kind)
    torch.manual_seed(0)
    model = Regression(MLP())
    for number in range(3):
        batch = vectors(10 * number)
        x = batch["x"].requires_grad_()
        loss = model(x=x, y=batch["y"])
        loss.backward()
        for result in results:
            torch.testing.assert_close(torch.tensor(result["losses"][number]), loss.detach())
            if kind == "leaf":
                torch.testing.assert_close(result["grads"][number], x.grad)


def test_broadcast_inputs_of_other_shapes(gloo2: Any) -> None:
    results = both(gloo2, other_shapes)
    for kind, text in results:
        assert kind in ("BatchMismatchError", "PlanMismatchError")
        assert "(6, 8, 64)" in text and "(7, 8, 64)" in text


def other_shapes() -> tuple[str, str]:
    first, second = [[4, 1], [5, 1], [6, 1]], [[4, 1], [5, 1], [7, 1]]
    return batches([first, second], same_inputs={"batches": "broadcast"})
