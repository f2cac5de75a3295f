"""The exchanges of three ranks as threads over one store in memory: failures, the cost, and keys
that an earlier start has left there."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from autoshard.runtime import compat
from autoshard.runtime.agreement import history, whereabouts, worlds
from autoshard.runtime.agreement.consensus import agree, ask, attempt, gather
from autoshard.runtime.agreement.store_exchange import StoreExchange
from autoshard.runtime.agreement.whereabouts import DEFAULT_LIMIT
from autoshard.runtime.errors import AutoshardError, CollectiveError, PlanMismatchError
from store_ranks import LIMIT, LOOK, CountingStore, N, Ranks, axis_of


@pytest.fixture(params=[1, 2], ids=["alone", "hosts"])
def ranks(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Ranks:
    return Ranks(monkeypatch, here=request.param)


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
    def job(rank: int, exchange: StoreExchange) -> Any:
        axis = axis_of(rank)
        return [gather([rank, turn], "turn", axis) for turn in range(50)]

    assert ranks(job) == [[[[r, turn] for r in range(N)] for turn in range(50)]] * N


@pytest.mark.parametrize("turn", range(3))
def test_every_attempt_after_a_failure_tells_of_it(ranks: Ranks, turn: int) -> None:
    def job(rank: int, exchange: StoreExchange) -> list[str]:
        return [compile_once(rank, rank == 1 and i == turn) for i in range(4)]

    for rank, said in enumerate(ranks(job)):
        assert said[:turn] == [""] * turn, said
        assert rank != 1 or said[turn] == "own"
        rest = said[turn + (rank == 1) :]
        assert all("rank 1: ValueError: no rule" in each for each in rest), said


def test_the_first_failure_is_told_to_all(ranks: Ranks) -> None:
    """All ranks fail by themselves; afterwards they agree on whose failure it was."""

    def job(rank: int, exchange: StoreExchange) -> list[str]:
        return [compile_once(rank, True), compile_once(rank, False)]

    results = ranks(job)
    assert [own for own, _ in results] == ["own"] * N
    assert len({said.partition(";")[0] for _, said in results}) == 1, results


def test_a_disagreement_on_one_axis_is_told_to_ranks_of_others(ranks: Ranks) -> None:
    """Ranks 0 and 1 disagree; rank 2 waits for them elsewhere."""

    def job(rank: int, exchange: StoreExchange) -> str:
        try:
            if rank < 2:
                agree("plan", str(rank), [f"line of {rank}"], axis_of(rank, 2))
            gather(rank, "all", axis_of(rank))
        except PlanMismatchError as error:
            return str(error)
        return ""

    assert all("rank 0: line of 0; rank 1: line of 1" in said for said in ranks(job))


def test_what_a_rank_gave_before_it_failed_is_given(ranks: Ranks) -> None:
    """Rank 0 gives its value and fails after rank 2 asked for it, and before it looks."""
    failed = threading.Event()
    asked, exchange = threading.Event(), ranks.exchanges[2]
    look = exchange._look

    def late(*args: Any) -> Any:
        asked.set()
        failed.wait(LIMIT)
        return look(*args)

    exchange._look = late  # type: ignore[method-assign]

    def job(rank: int, exchange: StoreExchange) -> tuple[Any, str]:
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


@pytest.mark.parametrize("size", [2, 8, 32])
def test_a_vote_costs_two_requests_a_rank(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """It adds one to a counter, and waits for the end, which the last rank tells."""
    store = CountingStore()

    def job(rank: int, exchange: StoreExchange) -> None:
        for turn in range(3):
            agree(f"turn {turn}", "alike", ["a line"] * 100, axis_of(rank, size))

    ranks = Ranks(monkeypatch, size, store)
    monkeypatch.setattr(whereabouts, "LOOK", LIMIT)  # nobody is late
    assert ranks(job) == [None] * size
    ended = size  # each tells that it has
    assert store.calls["add"] == 3 * size and store.calls["wait"] == 3 * (size - 1), store.calls
    assert store.calls["set"] == 3 + ended and store.calls["delete_key"] == 2 * 2, store.calls
    assert store.calls.keys() == {"add", "wait", "set", "delete_key", "clone"}, store.calls


def test_values_are_read_by_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what it makes of them by all; nothing is left but where each rank is."""
    store = CountingStore()

    def job(rank: int, exchange: StoreExchange) -> list[list[int]]:
        return [gather(rank + turn, "turn", axis_of(rank, 8)) for turn in range(3)]

    ranks = Ranks(monkeypatch, 8, store)
    monkeypatch.setattr(whereabouts, "LOOK", LIMIT)  # nobody is late
    assert ranks(job) == [[[*range(turn, turn + 8)] for turn in range(3)]] * 8
    calls = store.calls
    assert calls["multi_get"] == 3 and calls["add"] == 24 and calls["get"] == 21, calls
    assert calls["set"] == 24 + 24 + 3 + 8 and calls["check"] == 0, calls
    assert store.store.num_keys() == 8 + 2, "the last exchange has its counter and its end"


def test_ranks_that_differ_give_their_lines_once_for_each_digest(ranks: Ranks) -> None:
    def job(rank: int, exchange: StoreExchange) -> str:
        lines = [f"line {i}" for i in range(9)] + ["odd" if rank == 1 else "even"]
        try:
            agree("plan", str(rank == 1), lines, axis_of(rank))
        except PlanMismatchError as error:
            return str(error)
        return ""

    told = ranks(job)
    assert (
        len(set(told)) == 1
        and "line 10 is the first that differs: ranks 0, 2: even; rank 1: odd" in told[0]
    )


def missing(ranks: Ranks, absent: int, told: str = "", gone: bool = False) -> list[str]:
    """What the roll call of ranks that miss one another says, where one does not come to it."""

    def job(rank: int, exchange: StoreExchange) -> str:
        if rank == absent:
            if told:
                exchange.raised(told)
            ranks.done.wait(2 * LIMIT)
            return ""
        try:
            peers = {(rank + 1) % N: "tp"} if rank == 1 else {}
            return str(exchange.roll_call("the forward", peers, 1.5, gone))
        finally:
            ranks.left.append(rank)
            if len(ranks.left) == N - 1:
                ranks.done.set()

    return ranks(job)


def test_a_roll_call_names_the_rank_that_is_not_there(ranks: Ranks) -> None:
    """Rank 2 shares an axis with rank 1, and does not answer; rank 0 hears of it."""
    zero, one, _ = missing(ranks, 2)
    assert zero == one
    assert "rank 2: did not come to a collective of axis tp within 1.5 seconds" in one
    assert "where rank 1 waited (the forward)" in one


def test_a_rank_whose_connection_closed_is_said_to_be_dead(ranks: Ranks) -> None:
    _, one, _ = missing(ranks, 2, gone=True)
    assert "rank 2: died without a word: its connection was closed after 1.5 seconds" in one


def test_a_roll_call_prefers_what_the_rank_said(ranks: Ranks) -> None:
    for said in missing(ranks, 2, "RuntimeError: out of memory")[:2]:
        assert said == "rank 2: RuntimeError: out of memory"


def test_a_roll_call_of_all(ranks: Ranks) -> None:
    """Nobody is missing: they ran different collectives."""
    results = missing(ranks, N)
    assert len(set(results)) == 1 and "ran different collectives" in results[0], results


def test_the_first_reason_outlives_the_end_of_the_rank(ranks: Ranks) -> None:
    """Rank 1 fails and ends; who looks later hears why, not that it has ended."""

    def job(rank: int, exchange: StoreExchange) -> str:
        if rank == 1:
            exchange.fail(1, "ValueError: no rule")
            exchange.ended("has ended")
            return ""
        time.sleep(2 * LOOK)
        try:
            gather(rank, "plan", axis_of(rank))
        except PlanMismatchError as error:
            return str(error)
        return ""

    for said in (ranks(job)[0], ranks(job)[2]):
        assert "rank 1: ValueError: no rule" in said and "has ended" not in said


@pytest.mark.parametrize("ahead", [True, False])
def test_a_rank_in_a_collective_that_waits_for_this_one(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, ahead: bool
) -> None:
    """Rank 1 stands in a graph: its second, or that which the others have left."""
    monkeypatch.setattr(history, "LOOK", LOOK)
    group = [history.name_of(range(N))]

    def job(rank: int, exchange: StoreExchange) -> str:
        exchange.progress.enter(group, "the forward")
        if rank == 1:
            exchange.enter("the forward")
            if ahead:
                exchange.progress.enter(group, "the forward")
            ends = time.monotonic() + 30
            while exchange.failure is None and time.monotonic() < ends:
                time.sleep(LOOK)
            exchange.turn.leave()
            return str(exchange.failure)
        exchange.limit = LIMIT if ahead else 20 * LOOK
        try:
            agree("read", "1", [], axis_of(rank), note="train.py:7")
        except PlanMismatchError as error:
            return str(error)
        return ""

    for said in ranks(job):
        proven = "rank 1: is elsewhere: in the forward, which rank " in said or "(1, 'is " in said
        assert proven == ahead, said
        assert "the read (train.py:7)" in said


class NeverDone:
    """A collective to which another rank does not come."""

    def wait(self, timeout: Any = None) -> None:
        time.sleep(LOOK)
        raise RuntimeError("Operation timed out!")

    def is_completed(self) -> bool:
        return False


def test_a_comparison_by_a_collective_ends_where_another_rank_has_failed(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That rank may have caught its error: no connection is closed."""
    monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: NeverDone())
    monkeypatch.setattr(compat, "host_group", lambda _: None)

    def job(rank: int, exchange: StoreExchange) -> str:
        if rank == 1:
            time.sleep(4 * LOOK)
            return str(exchange.fail(1, "ValueError: no rule"))
        with pytest.raises(CollectiveError) as raised:
            ask(7, axis_of(rank))
        return str(raised.value)

    for rank, said in enumerate(ranks(job)):
        assert "rank 1: ValueError: no rule" in said, said
        assert rank == 1 or f"; rank {rank} waited in a comparison on axis tp" in said


class FrozenStore(CountingStore):
    """A store whose host stops after some requests, or is gone."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__()
        self.error, self.thaws = error, threading.Event()

    def __getattr__(self, name: str) -> Any:
        if name == "add" and self.error is not None:
            raise self.error
        if name == "add":
            self.thaws.wait(20 * LIMIT)
        return super().__getattr__(name)


@pytest.mark.parametrize("error", [None, dist.DistNetworkError("Connection reset by peer")])
def test_a_store_that_is_frozen_or_gone(
    monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    store = FrozenStore(error)
    ranks = Ranks(monkeypatch, 2, store)

    def job(rank: int, exchange: StoreExchange) -> list[str]:
        exchange.limit = 0.2
        said = []
        for _ in range(2):
            with pytest.raises(PlanMismatchError) as raised:
                gather(rank, "plan", axis_of(rank, 2))
            said.append(str(raised.value))
        return said

    for first, second in ranks(job):
        for said in (first, second):
            assert "the store of the process group" in said and "the process that holds it" in said
            assert ("Connection reset by peer" if error else "did not answer within") in said
    store.thaws.set()


NODES = "GROUP_WORLD_SIZE"


class Job:
    """Starts of a job under torchrun, whose agents keep one store for all of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, nodes: int) -> None:
        self.patch, self.store = monkeypatch, dist.HashStore()
        monkeypatch.setenv(NODES, str(nodes))
        monkeypatch.setattr(worlds.atexit, "register", lambda *_: None)

    def start(self, rank: int, counted: int, store: Any = None) -> str:
        """The prefix of the keys of a new process, whose agent has counted so many restarts."""
        world = SimpleNamespace(
            rank=lambda: rank, size=lambda: 4, get_group_store=lambda: store or self.store
        )
        self.patch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False" if store else "True")
        self.patch.setenv("TORCHELASTIC_RESTART_COUNT", str(counted))
        self.patch.setattr(worlds, "_current", worlds._Worlds(None, 0, DEFAULT_LIMIT))
        self.patch.setattr(worlds.dist, "group", SimpleNamespace(WORLD=world))
        worlds.renew()
        made = worlds._current.exchange
        assert made is not None
        return made.prefix


def test_starts_of_one_node_have_keys_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(monkeypatch, nodes=1)
    assert len({job.start(rank=1, counted=number) for number in range(3)}) == 3


@pytest.mark.parametrize("counted", [(0, 0), (0, 1), (1, 1)])
def test_a_later_start_of_several_nodes_is_refused(
    monkeypatch: pytest.MonkeyPatch, counted: tuple[int, int]
) -> None:
    """Whatever each agent has counted: a node that only sees the others start again counts none."""
    job = Job(monkeypatch, nodes=2)
    for rank in range(4):
        job.start(rank, counted[0])
    with pytest.raises(AutoshardError, match="rank 2 of an earlier start.* TORCH_DISABLE_SHARE"):
        job.start(2, counted[1])


def test_a_store_for_each_start_of_several_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(monkeypatch, nodes=2)
    for _ in range(2):
        store = dist.HashStore()
        for rank in range(4):
            job.start(rank, 0, store)
