"""Ranks as threads over one store in memory, of one host or of several."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from autoshard.runtime.agreement import consensus as agreement
from autoshard.runtime.agreement import whereabouts
from autoshard.runtime.agreement.store_exchange import Host, StoreExchange
from autoshard.runtime.collectives.axis import Axis

N = 3
LIMIT = 3.0  # seconds; never reached where nothing hangs
LOOK = 0.02


class CountingStore:
    """A store that counts the requests of each kind."""

    def __init__(self) -> None:
        self.store, self.calls = dist.HashStore(), Counter[str]()

    def clone(self) -> CountingStore:
        self.calls["clone"] += 1
        return self

    def __getattr__(self, name: str) -> Any:
        self.calls[name] += 1
        return getattr(self.store, name)


class World:
    """What an exchange asks of a process group."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self.store = store
        self.rank, self.size = (lambda: rank), (lambda: size)

    def get_group_store(self) -> Any:
        return self.store


Job = Callable[[int, StoreExchange], Any]


class Ranks:
    """Runs job(rank, exchange) in a thread a rank, and returns the results."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, size: int = N, store: Any = None, here: int = 1
    ) -> None:
        self.here = threading.local()
        self.left: list[int] = []  # ranks that have finished
        self.done = threading.Event()
        monkeypatch.setattr(agreement, "current_exchange", lambda: self.here.exchange)
        monkeypatch.setattr(agreement, "members", lambda axis: members_of(axis.group, axis.size))
        monkeypatch.setattr(whereabouts, "LOOK", LOOK)
        store = store or dist.HashStore()
        self.exchanges = [StoreExchange(World(store, rank, size), "0") for rank in range(size)]
        self.hosts = [CountingStore() for _ in range(0, size, here)]  # of so many ranks each
        for rank, exchange in enumerate(self.exchanges):
            exchange.limit = LIMIT
            if here > 1:
                first = rank // here * here
                exchange.host = Host(range(first, first + here), self.hosts[rank // here])

    def __call__(self, job: Job) -> list[Any]:
        results: list[Any] = [None] * len(self.exchanges)

        def work(rank: int) -> None:
            self.here.exchange = self.exchanges[rank]
            try:
                results[rank] = job(rank, self.exchanges[rank])
            except Exception as error:
                results[rank] = error
            self.exchanges[rank].ended("has ended")

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(results))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * LIMIT)
            assert not thread.is_alive(), "a rank hangs"
        return results


def axis_of(rank: int, size: int = N, group: str = "0 1") -> Axis:
    return Axis("tp", size, rank, group)


def members_of(group: str, size: int) -> list[int]:
    """The ranks of an axis whose group says the first of them and the step."""
    first, step = map(int, group.split())
    return [first + i * step for i in range(size)]
