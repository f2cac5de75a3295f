"""The operators of collectives with products, as they are on GPUs, without one: what torch's own
are called with, and which of two ways is taken."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from autoshard.errors import ConfigError
from autoshard.runtime import compat
from autoshard.runtime.collectives import GATHER_MATMUL, MATMUL_SCATTER, Axis, fused

RANKS = 4


@pytest.fixture
def group() -> Iterator[str]:
    """The name of a group of ranks that exist on paper."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    yield dist.group.WORLD.group_name  # type: ignore[union-attr]
    dist.destroy_process_group()


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("whole", [False, True])
def test_torchs_operators_take_what_they_are_given(group: str, dim: int, whole: bool) -> None:
    """On meta tensors: their schemas, and results of the shapes that graphs are told of."""
    with torch.device("meta"):
        shard, weights = torch.empty(8, 4, 6), [torch.empty(5, 6).t(), torch.empty(6, 7)]
        own = (RANKS, 0, group)
        want = GATHER_MATMUL(shard, weights, dim, whole, False, *own)
        got = compat.gather_matmul(shard, weights, dim, whole, group)
        assert [one.shape for one in got] == [one.shape for one in want]
        assert len(want) == 2 + whole and all(one.is_contiguous() for one in want)
        scattered = compat.matmul_scatter(shard, weights[0], dim, group)
        assert scattered.shape == MATMUL_SCATTER(shard, weights[0], dim, False, *own).shape


def test_the_quicker_way_is_measured_once_for_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slowest rank's time of each way counts; without the memory there is nothing to choose."""
    times, slowest, runs = iter([1.0, 2.0, 1.0, 2.0]), iter([[3.0, 2.0], [1.0, 2.0]]), []

    def measured(run: Any) -> float:
        runs.append(run())
        return next(times)

    reached = {"here": True, "apart": False}
    measured_before: dict[Any, bool] = {}
    monkeypatch.setattr(fused, "_measured", lambda: measured_before)
    monkeypatch.setattr(compat, "has_symmetric_memory", reached.__getitem__)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(compat, "gpu_milliseconds", measured)
    monkeypatch.setattr(fused, "all_reduce", lambda *_: torch.tensor(next(slowest)))

    def chosen(group: str, size: int, measure: bool = True) -> str:
        ways = (lambda: "fused", lambda: "plain")
        key = (group, torch.device("cpu"), size)
        found: str = fused._chosen(*ways, measure, Axis("tp", 2, 0, group), key)
        return found

    assert [chosen("here", size) for size in (1, 1, 2, 2)] == ["plain", "plain", "fused", "fused"]
    assert runs == ["fused", "plain"] * 2
    assert chosen("here", 3, measure=False) == "fused"
    assert chosen("apart", 1) == "plain"
    with pytest.raises(ConfigError, match="GPUs of an axis do not reach each other's memory"):
        chosen("apart", 1, measure=False)
