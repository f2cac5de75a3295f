"""The board of three ranks as threads over one store in memory: failures, retries, and the cost."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.runtime.agreement import board as board_module
from autoshard.runtime.agreement import consensus as agreement
from autoshard.runtime.agreement.board import Board
from autoshard.runtime.agreement.consensus import agree, attempt, gather
from autoshard.runtime.collectives.axis import Axis
from autoshard.runtime.errors import PlanMismatchError

N = 3
LIMIT = 3.0  # seconds; never reached where nothing hangs
LOOK = 0.02


class CountingStore:
    """A store that counts the requests of each kind."""

    def __init__(self) -> None:
        self.store, self.calls = dist.HashStore(), Counter[str]()

    def __getattr__(self, name: str) -> Any:
        self.calls[name] += 1
        return getattr(self.store, name)


class World:
    """What a Board asks of a process group."""

    def __init__(self, store: Any) -> None:
        self.store = store

    def get_group_store(self) -> Any:
        return self.store


Job = Callable[[int, Board], Any]


class Ranks:
    """Runs job(rank, board) in a thread a rank, and returns the results."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, size: int = N, store: Any = None) -> None:
        self.here = threading.local()
        monkeypatch.setattr(agreement, "board", lambda: self.here.board)
        monkeypatch.setattr(agreement, "_members", lambda axis: list(range(axis.size)))
        monkeypatch.setattr(board_module, "_LOOK", LOOK)
        self.boards = []
        for rank in range(size):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(dist, "get_rank", lambda rank=rank: rank)
                self.boards.append(Board(World(store or dist.HashStore()), 0))
                store = store or self.boards[0].world.store
            self.boards[-1].limit = LIMIT

    def __call__(self, job: Job) -> list[Any]:
        results: list[Any] = [None] * len(self.boards)

        def work(rank: int) -> None:
            self.here.board = self.boards[rank]
            try:
                results[rank] = job(rank, self.boards[rank])
            except Exception as error:
                results[rank] = error
            self.boards[rank].leave()

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(results))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * LIMIT)
            assert not thread.is_alive(), "a rank hangs"
        return results


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    return Ranks(monkeypatch)


def axis_of(rank: int, size: int = N) -> Axis:
    return Axis("tp", size, rank, "group")


def compile_once(rank: int, fails: bool, what: str = "plan") -> str:
    """What the backend does in one attempt: two things are compared. Returns what was raised."""
    axis = axis_of(rank)
    try:
        with attempt():
            if fails:
                raise ValueError("no rule")
            agree(what, "1", [], axis)
            agree("compiled program", "", [], axis)
    except PlanMismatchError as error:
        return str(error)
    except ValueError:
        time.sleep(8 * LOOK)  # whoever tries again at once is not seen to have failed
        return "own"
    return ""


def test_all_meet_in_order(ranks: Ranks) -> None:
    def job(rank: int, board: Board) -> Any:
        axis = axis_of(rank)
        return [gather([rank, turn], "turn", axis) for turn in range(50)]

    assert ranks(job) == [[[[r, turn] for r in range(N)] for turn in range(50)]] * N


@pytest.mark.parametrize("ahead", [(0, 0, 0), (3, 0, 0), (0, 3, 0), (0, 1, 5)])
def test_counters_that_differ_hide_no_failure(ranks: Ranks, ahead: tuple[int, ...]) -> None:
    """Ranks have begun different numbers of attempts; once they have met, failures are heard."""

    def job(rank: int, board: Board) -> list[str]:
        board.attempt = ahead[rank]
        return [compile_once(rank, False), *(compile_once(rank, rank == 1) for _ in range(2)),
                compile_once(rank, False)]

    results = ranks(job)
    for rank, (first, *failed, last) in enumerate(results):
        assert first == last == "", results
        expected = "own" if rank == 1 else "rank 1: ValueError: no rule"
        assert all(expected in said for said in failed), results


def test_a_failure_of_each_by_itself_is_not_told_to_the_next_attempt(ranks: Ranks) -> None:
    """A fast rank tries again while the slow one still fails in the attempt before."""

    def job(rank: int, board: Board) -> list[str]:
        if rank == 2:
            time.sleep(0.3)
        return [compile_once(rank, True), compile_once(rank, False)]

    assert ranks(job) == [["own", ""]] * N


def test_what_a_rank_gave_before_it_failed_is_given(ranks: Ranks) -> None:
    """Rank 0 gives its value and fails after rank 2 asked for it, and before it looks."""
    failed = threading.Event()
    asked, board = threading.Event(), ranks.boards[2]
    look = board._look

    def late(member: int, name: str) -> Any:
        asked.set()
        failed.wait(LIMIT)
        return look(member, name)

    board._look = late  # type: ignore[method-assign]

    def job(rank: int, board: Board) -> tuple[Any, str]:
        met = None
        try:
            with attempt():
                if rank == 0:
                    asked.wait(LIMIT)
                met = gather(rank, "plan", axis_of(rank))
                if rank == 0:
                    raise ValueError("later")
                gather(rank, "compiled program", axis_of(rank))
        except (ValueError, PlanMismatchError) as error:
            failed.set()
            time.sleep(8 * LOOK)
            return met, str(error)
        return met, ""

    results = ranks(job)
    assert [met for met, _ in results] == [[0, 1, 2]] * N, results
    assert all("later" in said for _, said in results), results


def test_a_value_that_was_withdrawn_is_not_waited_for_in_the_store(ranks: Ranks) -> None:
    """Rank 0 gives up and tries again; what it gave first is not read, nor waited for."""

    def job(rank: int, board: Board) -> Any:
        axis = axis_of(rank)
        if rank == 0:
            board.limit = 0.3
        elif rank == 2:
            time.sleep(0.5)
        try:
            with attempt():
                return gather(f"old {rank}", "plan", axis)
        except PlanMismatchError:
            time.sleep(0.6 if rank == 0 else 0)  # rank 2 comes in between
            with attempt():
                board.limit = LIMIT
                return gather(f"new {rank}", "plan", axis)

    results = ranks(job)
    for found in results:
        assert isinstance(found, list) and found[0] == "new 0", results


@settings(max_examples=12, deadline=None)
@given(
    st.lists(st.integers(0, 2), min_size=N, max_size=N),
    st.lists(st.sampled_from([0.0, 0.01, 0.05]), min_size=N, max_size=N),
)
def test_ranks_that_try_until_it_works_all_get_there(
    failures: list[int], pauses: list[float]
) -> None:
    """Each rank fails so many times by itself; every error is told, and nobody waits in vain."""

    def job(rank: int, board: Board) -> list[str]:
        said = []
        for turn in range(12):
            time.sleep(pauses[rank])
            said.append(compile_once(rank, turn < failures[rank]))
            if not said[-1]:
                break
        return said

    with pytest.MonkeyPatch.context() as patch:
        results = Ranks(patch)(job)
    for rank, said in enumerate(results):
        assert said[-1] == "" and said.count("own") == failures[rank], (failures, results)
        assert "did not arrive" not in "".join(said) and "has ended" not in "".join(said), results


def test_an_exchange_costs_few_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its value, where it is, and where it ended; those of the others in one request."""
    store = CountingStore()

    def job(rank: int, board: Board) -> None:
        gather(rank, "turn", axis_of(rank, 8))

    ranks = Ranks(monkeypatch, 8, store)
    monkeypatch.setattr(board_module, "_LOOK", LIMIT)  # nobody is late
    assert ranks(job) == [None] * 8
    assert store.calls["multi_get"] == 8 and store.calls["set"] == 24, store.calls
    assert store.calls["get"] == store.calls["delete_key"] == 0, store.calls
