"""The pool reports what workers return and raise, survives what it can, and never hangs."""

from __future__ import annotations

import os
import time

import pytest

import gloo_pool
from gloo_pool import GlooPool, PoolError


def rank_sum(offset: int) -> tuple[int, float, bool]:
    import torch
    import torch.distributed as dist

    started = dist.is_initialized()
    if not started:
        dist.init_process_group("gloo")
    x = torch.tensor(float(dist.get_rank() + offset))
    dist.all_reduce(x)
    return dist.get_rank(), x.item(), started


def fail_everywhere() -> None:
    raise ValueError(f"no good on {os.environ['WORLD_SIZE']}")


def fail_on_one(rank: int) -> None:
    import torch.distributed as dist

    if dist.get_rank() == rank:
        raise ValueError(f"only rank {rank}")
    dist.barrier()


def die_on_one(rank: int) -> None:
    if int(os.environ["RANK"]) == rank:
        os._exit(3)
    time.sleep(600)


def sleep_on_one(rank: int) -> None:
    if int(os.environ["RANK"]) == rank:
        time.sleep(600)


def test_results_come_by_rank_and_the_process_group_persists(gloo2: GlooPool) -> None:
    first = gloo2(rank_sum, 1)
    assert [result[:2] for result in first] == [(0, 3.0), (1, 3.0)]
    assert gloo2(rank_sum, 2) == [(0, 5.0, True), (1, 5.0, True)]


def test_an_error_on_all_ranks_keeps_the_pool(gloo2: GlooPool) -> None:
    before = gloo2(os.getpid)
    with pytest.raises(ValueError, match="no good on 2") as caught:
        gloo2(fail_everywhere)
    assert "fail_everywhere" in str(caught.value.__cause__)
    assert gloo2(os.getpid) == before


def test_an_error_on_one_rank_restarts_the_pool(
    gloo2: GlooPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gloo_pool, "GRACE", 1.0)
    gloo2(rank_sum, 0)
    before = gloo2(os.getpid)
    with pytest.raises(ValueError, match="only rank 1"):
        gloo2(fail_on_one, 1)
    assert set(before).isdisjoint(gloo2(os.getpid))


def test_a_dead_worker_is_named(gloo2: GlooPool) -> None:
    with pytest.raises(PoolError, match=r"rank 1 of 2 died \(exit code 3\)"):
        gloo2(die_on_one, 1)
    assert len(gloo2(os.getpid)) == 2


def test_a_silent_worker_shows_its_stack(gloo2: GlooPool) -> None:
    gloo2(os.getpid)
    with pytest.raises(PoolError, match="ranks \\[0\\] of 2 gave no answer") as caught:
        gloo2(sleep_on_one, 0, pool_timeout=3.0)
    assert "in sleep_on_one" in str(caught.value)
