"""Ranks that differ all stop, and all say where."""

from __future__ import annotations

import linecache
import signal
import subprocess
import threading
from typing import Any
from unittest import mock

import pytest
import torch
from torch import fx

from autoshard.runtime.agreement import consensus, history, regions, threads
from autoshard.runtime.agreement.consensus import agree, gather
from autoshard.runtime.agreement.regions import in_flight
from autoshard.runtime.agreement.store_exchange import StoreExchange
from autoshard.runtime.collectives.axis import Axis
from autoshard.runtime.errors import PlanMismatchError
from autoshard.runtime.mesh import init_mesh, offline_mesh
from gloo_pool import GlooPool
from store_ranks import LIMIT, LOOK, N, Ranks, axis_of


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


def test_all_axes_of_a_job_are_asked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    world = Axis("world", 4, 1, "0")
    monkeypatch.setattr(consensus, "world_axis", lambda: world)
    dp, tp = Axis("dp_shard", 2, 0, "1"), Axis("tp", 2, 1, "2")
    assert consensus.everyone([dp, tp]) == [world]
    for axes in ([dp], [dp, tp, tp], [dp, tp._replace(group="lockstep:7")]):
        assert consensus.everyone(axes) == axes


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


@pytest.mark.parametrize("waits", ["a collective", "an exchange"])
def test_all_ranks_that_have_not_come_are_named(
    monkeypatch: pytest.MonkeyPatch, waits: str
) -> None:
    told = threading.Event()

    def job(rank: int, exchange: StoreExchange) -> str:
        if rank != 1:
            told.wait(4 * LIMIT)
            return ""
        exchange.limit = 0.5
        try:
            if waits == "a collective":
                return str(exchange.roll_call("the forward", {0: "tp", 2: "tp"}, 1.5))
            gather(rank, "plan", Axis("tp", 7, rank, "0 1"))
        except PlanMismatchError as error:
            return str(error)
        finally:
            told.set()
        return ""

    said = Ranks(monkeypatch, 7)(job)[1]
    assert said.startswith("rank 0: did not"), said
    assert ", nor did ranks 2 to 6; it is stopped" in said, said


def test_a_rank_that_is_killed_while_others_wait_for_its_vote(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its process is looked at by those of its host; whoever is only stopped is waited for."""
    child = subprocess.Popen(["sleep", "100"])
    number, began = child.pid, threads._stat(child.pid)
    assert began is not None
    told = threading.Event()
    stopped = []

    def job(rank: int, exchange: StoreExchange) -> str:
        exchange.limit = 60.0
        if rank == 2:
            here = threads.this_process()
            assert here is not None
            exchange._put(exchange._process(2), here._replace(number=number, began=began[1]))
            child.send_signal(signal.SIGSTOP)
            stopped.append(not told.wait(0.5))
            child.kill()
            told.wait(LIMIT)
            return ""
        exchange.tell_process()
        try:
            agree("plan", "1", [], axis_of(rank))
        except PlanMismatchError as error:
            return str(error)
        finally:
            told.set()
        return ""

    said = Ranks(monkeypatch)(job)
    child.wait()
    assert stopped == [True]
    for text in said[:2]:
        assert text.startswith("rank 2: died without a word: its process is gone, while rank "), (
            said
        )


def _late(*_: Any) -> Any:
    raise RuntimeError("gloo: timed out")


def _raised(run: Any, *args: Any) -> BaseException:
    with pytest.raises(RuntimeError) as caught:
        run(*args)
    return caught.value


def test_a_late_collective_is_named_by_the_line_of_its_node() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    summed = graph.call_function(_late, (x, "sum", "0"))
    frames = [f'File "{path}", line 12, in f' for path in ("model.py", regions.__file__)]
    summed.meta["stack_trace"] = "\n".join(frames)  # a parameter is read in a file of ours
    graph.output(graph.call_function(torch.relu, (summed,)))
    error = _raised(fx.GraphModule(torch.nn.Module(), graph), torch.ones(2))
    assert in_flight(error, {}) == ", in _late of model.py:12"
    del summed.meta["stack_trace"]
    error = _raised(fx.GraphModule(torch.nn.Module(), graph), torch.ones(2))
    assert in_flight(error, {}) == ", in _late"


CODE = """\
def call(buf0, buf1):
    # Topologically Sorted Source Nodes: [up, down], Original ATen: [aten.mm]
    buf2 = torch.ops._c10d_functional.all_reduce_.default(buf1, 'sum', '0')
    # Topologically Sorted Source Nodes: [], Original ATen: []
    buf3 = torch.ops._c10d_functional.all_gather_into_tensor.default(buf0, 2, '0')
    torch.ops._c10d_functional.wait_tensor.default(buf2)
"""


def test_a_late_collective_of_compiled_code_is_named_by_the_node_in_its_comment() -> None:
    path = "/tmp/torchinductor/code.py"
    linecache.cache[path] = (len(CODE), None, CODE.splitlines(True), path)
    names: dict[str, Any] = {"torch": mock.MagicMock()}
    names["torch"].ops._c10d_functional.wait_tensor.default = _late
    exec(compile(CODE, path, "exec"), names)
    error = _raised(names["call"], 0, 1)
    assert in_flight(error, {"up": "model.py:7", "down": "model.py:8"}) == (
        ", in all_reduce of model.py:8"
    )
    assert in_flight(error, {}) == f", in {path}:6"
    error.add_note("a receive of the values of model.py:9, from place 0 of pp")
    assert in_flight(error, {}).endswith("model.py:9, from place 0 of pp")
