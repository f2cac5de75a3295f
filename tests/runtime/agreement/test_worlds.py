"""Processes that torchrun starts again, and the keys of those that have ended: on one node they are
other keys, on several the guard finds them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from autoshard.runtime.agreement import worlds
from autoshard.runtime.agreement.whereabouts import DEFAULT_LIMIT
from autoshard.runtime.errors import AutoshardError

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
