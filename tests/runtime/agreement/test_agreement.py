"""Ranks that differ all stop, and all say where."""

from __future__ import annotations

import threading

import pytest
import torch

from autoshard.runtime.agreement import history
from autoshard.runtime.agreement.consensus import agree
from autoshard.runtime.agreement.store_exchange import StoreExchange
from autoshard.runtime.collectives.axis import Axis
from autoshard.runtime.errors import PlanMismatchError
from autoshard.runtime.mesh import init_mesh, offline_mesh
from gloo_pool import GlooPool
from store_ranks import LIMIT, LOOK, N, Ranks


def run_agreement(lines: list[list[str]], digests: list[str]) -> str:
    axis = init_mesh({"tp": 2}, "cpu").axis("tp")
    with torch.inference_mode():  # the caller's modes do not matter
        try:
            agree("plan", digests[axis.rank], lines[axis.rank], axis)
        except PlanMismatchError as error:
            return str(error)
    return ""


def test_equal_digests_pass_whatever_the_detail(gloo2: GlooPool) -> None:
    assert gloo2(run_agreement, [["a"], ["b"]], ["1", "1"]) == ["", ""]


def test_the_first_difference_is_named_on_every_rank(gloo2: GlooPool) -> None:
    lines = [["a: I", "b: S(0)", "c: I"], ["a: I", "b: S(1)", "c: P"]]
    told = gloo2(run_agreement, lines, ["1", "2"])
    assert told[0] == told[1]
    assert told[0].startswith(
        "the ranks of axis tp disagree on the plan; line 2 is the first that differs: "
        "rank 0: b: S(0); rank 1: b: S(1). Build the same model"
    )


def test_a_rank_with_fewer_lines_and_a_digest_without_a_line(gloo2: GlooPool) -> None:
    told = gloo2(run_agreement, [["a", "b"], ["a"]], ["1", "2"])
    assert "line 2 is the first that differs: rank 0: b; rank 1: (nothing)" in told[0] == told[1]
    told = gloo2(run_agreement, [["a"], ["a"]], ["1", "2"])
    assert "lines are equal and their digests are not: rank 0: 1, rank 1: 2" in told[0]


@pytest.mark.parametrize(
    "axis",
    [Axis("tp", 1, 0, ""), offline_mesh({"tp": 2}, 1).axis("tp"), Axis("tp", 2, 0, "lockstep:7")],
)
def test_axes_without_a_process_group_agree(axis: Axis) -> None:
    agree("plan", "1", [], axis)


def test_a_rank_that_lives_is_not_said_to_be_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 2 died; rank 0, first in the order, computes longer than the roll call takes."""
    monkeypatch.setattr(history, "LOOK", LOOK)
    told = threading.Event()

    def job(rank: int, exchange: StoreExchange) -> str:
        if rank == 0:
            exchange.progress.enter([history.name_of(range(N))], "the forward")
        if rank != 1:
            told.wait(2 * LIMIT)
            return ""
        try:
            return str(exchange.roll_call("the forward", {0: "tp", 2: "tp"}, 1.5, gone=True))
        finally:
            told.set()

    assert "rank 2: died without a word" in Ranks(monkeypatch)(job)[1]
