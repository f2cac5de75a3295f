"""Ranks of one host vote there first: what is asked of the world's store, and what all are told."""

from __future__ import annotations

import random
import time

import pytest

from autoshard.runtime.agreement import whereabouts
from autoshard.runtime.agreement.consensus import agree, combined
from autoshard.runtime.agreement.store_exchange import SAME, StoreExchange
from store_ranks import LIMIT, LOOK, CountingStore, Ranks, axis_of, members_of


def test_a_host_votes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two requests of its store a rank, two of the world's a host, and none within one."""
    store, size, here = CountingStore(), 12, 4

    def job(rank: int, exchange: StoreExchange) -> None:
        for turn in range(3):
            agree(f"turn {turn}", "alike", [], axis_of(rank, size))
            agree(f"tp {turn}", "alike", [], axis_of(rank % here, here, f"{rank - rank % here} 1"))

    ranks = Ranks(monkeypatch, size, store, here)
    monkeypatch.setattr(whereabouts, "LOOK", LIMIT)  # nobody is late
    assert ranks(job) == [None] * size
    hosts, calls = size // here, store.calls
    assert calls["add"] == 3 * hosts and calls["wait"] == 3 * (hosts - 1), calls
    assert calls["set"] == 3 + size and calls["delete_key"] == 2 * 2, calls
    for host in ranks.hosts:
        assert host.calls["add"] == 2 * 3 * here and host.store.num_keys() <= 2 * 2, host.calls


def test_ranks_of_hosts_that_are_late_or_differ_have_one_result(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Groups within a host, across hosts, and of all; each of forty exchanges by chance."""
    size, here = 6, 3
    shapes = [(size, lambda _: "0 1"), (here, lambda r: f"{r // here * here} 1")]
    shapes += [(size // here, lambda r: f"{r % here} {here}")]
    chance = random.Random(0)
    plan = [(chance.randrange(3), chance.random() < 0.7) for _ in range(40)]

    def job(rank: int, exchange: StoreExchange) -> list[bool]:
        own, found = random.Random(rank), []
        for turn, (shape, alike) in enumerate(plan):
            if own.random() < 0.2:
                time.sleep(own.choice([0.5, 1, 1.5, 4]) * LOOK)
            n, group = shapes[shape]
            axis = axis_of(members_of(group(rank), n).index(rank), n, group(rank))
            value = [turn, 0 if alike else rank]
            got = combined(value, "turn", axis, list, alike=True)
            given = [[turn, 0 if alike else m] for m in members_of(group(rank), n)]
            found.append(got is SAME if alike else got == given)
        return found

    assert Ranks(monkeypatch, size, here=here)(job) == [[True] * len(plan)] * size
