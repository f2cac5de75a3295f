"""Hosts without a common folder: one of them compiles a graph, the others load it or say why not.

Ranks as threads over one store in memory; what Inductor makes is a few bytes. The real thing is in
tests/compiling/test_warm_start.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from autoshard.runtime import compat
from autoshard.runtime.agreement import compiled_once
from autoshard.runtime.agreement.compiled_once import PIECE, Ahead, Compiles
from autoshard.runtime.agreement.store_exchange import StoreExchange
from store_ranks import World

MADE = bytes(range(256)) * 10_000  # three pieces


class Hosts:
    """Ranks, each with the name of its folder and the kind of its host."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folders: str, kinds: str = "") -> None:
        self.store = dist.HashStore()
        self.compiled: list[int] = []
        self.loaded: list[tuple[int, bytes]] = []
        self.here = threading.local()
        kinds = kinds or "x" * len(folders)

        @contextlib.contextmanager
        def recorded() -> Iterator[Callable[[], bytes]]:
            yield lambda: MADE

        monkeypatch.setattr(compat, "recorded", recorded)
        monkeypatch.setattr(compat, "load_recorded", self.load)
        monkeypatch.setattr(compiled_once, "BEAT", 0.01)
        self.ranks: list[Compiles] = []
        for rank, (folder, kind) in enumerate(zip(folders, kinds, strict=True)):
            monkeypatch.setattr(compat, "cache_folder", lambda folder=folder: folder)
            monkeypatch.setattr(compat, "kind_of_host", lambda kind=kind: kind)
            exchange = StoreExchange(World(self.store, rank, len(folders)), "0")
            self.ranks.append(Compiles(exchange))

    def load(self, data: bytes) -> None:
        self.loaded.append((self.here.rank, data))

    def compile(self, rank: int, key: str = "graph", takes: float = 0.0) -> None:
        """What `first_compiles` does on a rank that finds nothing in its folder."""
        self.here.rank = rank
        before = len(self.loaded)
        with self.ranks[rank].once(key):
            time.sleep(takes)
            if len(self.loaded) == before:
                self.compiled.append(rank)

    def together(self, takes: float) -> None:
        threads = [
            threading.Thread(target=self.compile, args=(rank, "graph", takes))
            for rank in range(len(self.ranks))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
            assert not thread.is_alive(), "a rank hangs"


def test_one_host_compiles_and_the_others_load(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = Hosts(monkeypatch, "abc")
    before = hosts.store.num_keys()
    hosts.together(0.1)
    assert len(hosts.compiled) == 1
    assert [data for _, data in hosts.loaded] == [MADE, MADE]
    assert sum(rank.made for rank in hosts.ranks) == 1
    assert sorted(rank.bytes for rank in hosts.ranks) == [0, len(MADE), len(MADE)]
    assert not any(rank.lines for rank in hosts.ranks)
    assert hosts.store.num_keys() - before < 10, "the pieces are gone when all have read them"


def test_a_folder_asks_once(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = Hosts(monkeypatch, "aabb")
    for rank in range(4):
        hosts.compile(rank)
    assert hosts.compiled == [0, 1, 3], "ranks 1 and 3 find it in their folder"
    assert [rank for rank, _ in hosts.loaded] == [2]


def test_one_folder_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = Hosts(monkeypatch, "aa")
    before = hosts.store.num_keys()
    hosts.compile(0)
    hosts.compile(1)
    assert hosts.store.num_keys() == before and not hosts.ranks[0].made


def test_hosts_of_two_kinds_compile_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = Hosts(monkeypatch, "abc", "xyx")
    for rank in range(3):
        hosts.compile(rank)
    assert hosts.compiled == [0, 1] and [rank for rank, _ in hosts.loaded] == [2]


def test_values_are_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = Hosts(monkeypatch, "abc")
    hosts.compile(0)
    key = f"{hosts.ranks[0]._graphs}/graph"
    pieces = json.loads(hosts.store.get(f"{key}/end"))["pieces"]
    assert [len(hosts.store.get(f"{key}/{i}")) for i in range(pieces)] == [
        PIECE,
        PIECE,
        len(MADE) - 2 * PIECE,
    ]
    monkeypatch.setattr(compiled_once, "MOST", len(MADE) - 1)
    hosts.compile(1, "other")
    hosts.compile(0, "other")
    assert hosts.compiled == [0, 1, 0] and "2560000 bytes" in hosts.ranks[0].lines[0]


def test_damaged_bytes_are_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = Hosts(monkeypatch, "abc")
    hosts.compile(0)
    hosts.store.set(f"{hosts.ranks[0]._graphs}/graph/1", "other")
    hosts.compile(1)
    assert hosts.compiled == [0, 1] and not hosts.loaded
    assert "not those that it made (rank 0 was first)" in hosts.ranks[1].lines[0]


def test_bytes_that_torch_cannot_read(monkeypatch: pytest.MonkeyPatch) -> None:
    real = compat.load_recorded
    hosts = Hosts(monkeypatch, "ab")
    hosts.compile(0)
    monkeypatch.setattr(compat, "load_recorded", real)
    hosts.compile(1)
    assert hosts.compiled == [0, 1] and "no artifact of this torch" in hosts.ranks[1].lines[0]


def test_an_error_of_the_first_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = Hosts(monkeypatch, "ab")
    with pytest.raises(ValueError, match="no kernel"), hosts.ranks[0].once("graph"):
        raise ValueError("no kernel")
    hosts.compile(1)
    assert hosts.compiled == [1] and "compilation failed" in hosts.ranks[1].lines[0]


@pytest.mark.parametrize("alive", [True, False])
def test_who_says_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, alive: bool) -> None:
    monkeypatch.setattr(compiled_once, "SILENCE", 0.3)
    hosts = Hosts(monkeypatch, "ab")
    if not alive:
        monkeypatch.setattr(Compiles, "_beating", lambda *_: contextlib.nullcontext())
    first: Any = threading.Thread(target=hosts.compile, args=(0, "graph", 1.0))
    first.start()
    time.sleep(0.1)
    hosts.compile(1)
    first.join()
    assert hosts.compiled == ([0] if alive else [1, 0])
    assert ("no sign of life" in "".join(hosts.ranks[1].lines)) is not alive


def test_a_graph_that_was_made_ahead_is_asked_of_no_host(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hosts, shared, headers = Hosts(monkeypatch, "a"), mock.MagicMock(), mock.MagicMock()
    hosts.here.rank = 0
    monkeypatch.setattr(compat, "empty_cache", contextlib.nullcontext)
    monkeypatch.setattr(compat, "without_headers", headers)
    facts = {kind: [f"{kind} 1"] for kind in ("model", "options", "versions", "device")}
    ahead, job = Ahead(), Ahead()
    before = os.umask(0o077)
    with contextlib.ExitStack() as last, ahead.making(tmp_path):
        last.callback(os.umask, before)
        assert ahead.facts is not None
        ahead.facts.update(facts)
        for key in ("one", "other"):
            with ahead.once(None, key):
                pass
    assert ahead.facts is None and not ahead.graphs
    assert [path.stat().st_mode & 0o777 for path in tmp_path.iterdir()] == [0o644] * 2
    with job.once(shared, "one"):  # nothing is loaded yet
        pass
    assert shared.once.call_args_list == [mock.call("one")] and not headers.called
    for _ in range(2):  # what is loaded already is not again
        assert job.load(tmp_path, facts) == set() and job.graphs == {"one", "other"}
    assert hosts.loaded == [(0, MADE)]
    with job.once(shared, "one"):
        pass
    assert len(shared.once.call_args_list) == 1 and headers.called
    with pytest.warns(UserWarning, match="is not in .*, and is compiled"), job.once(shared, "new"):
        pass
    assert shared.once.call_args_list[1:] == [mock.call("new")]
