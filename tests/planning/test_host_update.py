"""Optimizer states on the host: bytes and seconds by hand, in the search and under a budget."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import autoshard
from autoshard.errors import ConfigError
from autoshard.mesh_search import search_meshes
from autoshard.planning.cost import Cluster, cluster
from autoshard.planning.cost.machines import Efficiency, Link
from autoshard.planning.estimate import Layout, Training, host_update
from autoshard.planning.estimate.memory import RankHolds, SavedForBackward, footprint
from autoshard.planning.estimate.weights import Weight
from autoshard.planning.search import asked
from autoshard.planning.search.asked import BatchAxis
from autoshard.runtime.collectives import TWICE, WHOLE

WEIGHTS = [
    Weight(name=f"w{i}", shape=(1000, 1000), itemsize=2, trained=i < 10, use=i, again=True)
    for i in range(12)
]
H100 = cluster("h100")
ROUND: Cluster = replace(  # 1e9 bytes a second to the host, 2e9 in its memory
    H100,
    device=replace(H100.device, host=Link(0.0, 1e9, 1e9), host_memory_bandwidth=2e9),
    efficiency=Efficiency(memory=1.0, links=1.0),
)


@pytest.mark.parametrize(
    ("training", "on_device", "on_host", "moved"),
    [
        # bytes an element: the step reads the gradient, and reads and writes the rest; the copies
        # write the gradient and the parameter there, and read the parameter
        (Training("adamw", "pure", states="host"), 4, 4, 2 + 2 * (2 + 4) + 2 + 2 * 2),
        (Training("momentum", "mixed", states="host"), 8, 4, 4 + 2 * (4 + 4) + 4 + 2 * 4),
        # of a copy in float32: its rounding, the comparison, the gradient's and the result's
        # conversion are 50 - 28 bytes more than the step
        (Training("adamw", "master", states="host"), 4, 12, 50 + 2 + 2 * 2),
    ],
)
def test_bytes_and_seconds(training: Training, on_device: int, on_host: int, moved: int) -> None:
    stored, gradient = training.stored(2), training.gradient(2)
    assert sum(WEIGHTS[0].holds(1, training)) == on_device
    found = host_update(WEIGHTS, Layout(shard=2), training, ROUND)
    elements = 5_000_000  # of a rank, of those that are trained
    assert found.nbytes == on_host * elements
    assert found.reads == pytest.approx(elements * (gradient + stored) / 1e9)
    assert found.writes == pytest.approx(elements * stored / 1e9)
    assert found.work == pytest.approx(elements * moved / 2e9)
    ends = 500_000 * (gradient + 2 * stored) / 1e9  # the first read, the last write
    assert found.seconds == pytest.approx(max(found.reads, found.work) + ends)


def test_each_rank_updates_the_whole_of_a_weight_that_dp_shard_leaves_whole() -> None:
    training = Training("adamw", "pure", states="host")
    kept = [replace(weight, choice=WHOLE) for weight in WEIGHTS]
    whole = host_update(WEIGHTS, Layout(), training, ROUND)
    assert host_update(kept, Layout(shard=2), training, ROUND) == whole


def test_a_slow_link_is_waited_for_and_an_unknown_one_is_an_error() -> None:
    slow = replace(ROUND, device=replace(ROUND.device, host=Link(0.0, 1e6, 1e9)))
    training = Training(states="host")
    found = host_update(WEIGHTS, Layout(), training, slow)
    assert found.reads > found.work and found.seconds > found.reads
    with pytest.raises(ConfigError, match="the way to the host of h100 is not known"):
        unknown = replace(ROUND, device=replace(ROUND.device, host=None))
        host_update(WEIGHTS, Layout(), training, unknown)


def test_the_hosts_memory_in_a_file(tmp_path: Path) -> None:
    body: dict[str, Any] = {
        "name": "own",
        "devices_per_node": 8,
        "memory": {"gigabytes": 80, "gigabytes_per_second": 3350},
        "tera_flops": {"float8": 1979, "half": 989, "float32": 67, "float64": 67},
        "inside": {"microseconds": 1.5, "gigabytes_per_second": 450},
        "between": {"microseconds": 5, "gigabytes_per_second": 50},
        "host": {"microseconds": 10, "gigabytes_per_second": 64},
    }
    path = tmp_path / "own.json"
    path.write_text(json.dumps(body))
    assert cluster(str(path)).device.host_memory_bandwidth == 50e9
    body["host"]["memory_gigabytes_per_second"] = 76.8
    path.write_text(json.dumps(body))
    read = cluster(str(path)).device
    assert read.host == H100.device.host and read.host_memory_bandwidth == 76.8e9
    body["host"]["memory_gigabytes"] = 2000
    path.write_text(json.dumps(body))
    with pytest.raises(ConfigError, match="memory_gigabytes"):
        cluster(str(path))


class Deep(nn.Module):
    """Weights outweigh activations."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(8)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()  # type: ignore[no-any-return]


def test_a_row_that_does_not_fit_says_that_it_would() -> None:
    with torch.device("meta"):
        model, batch = Deep(), torch.zeros(4, 256)

    def row(budget: int, states: str = "device") -> Any:
        memory = {"budget": budget, "optimizer_states": states}
        found = search_meshes(model, (batch,), world=2, mesh={"dp_shard": 2}, memory=memory)
        return found.rows[0]

    free, there = row(1 << 40), row(1 << 40, "host")
    assert free.memory.total - there.memory.total == free.memory.optimizer == 2 * 4 * 262_144
    assert there.host_update.nbytes == free.memory.optimizer and free.host_update is None
    assert there.timing.step - free.timing.step == pytest.approx(
        there.host_update.seconds - free.timing.optimizer
    )
    remedy = "the optimizer's states on the host (memory.optimizer_states=host)"
    between = row(there.memory.total)
    assert not between.fits and remedy in between.unfit
    assert row(there.memory.total, "host").fits
    assert remedy not in row(there.memory.total // 2).unfit


def test_a_budget_counts_what_stays_on_the_device() -> None:
    def trace(**options: Any) -> Any:
        return autoshard.trace(Deep(), (torch.zeros(4, 256),), inner="aot_eager", **options)

    program = trace(mesh={"tp": 2}, memory={"optimizer_states": "host"})
    there, here = program.memory(), program.memory("adamw")
    assert there == program.memory("host") and there.optimizer == 0 < here.optimizer
    budget = int(1.01 * there.peak)
    assert here.peak > 1.3 * budget
    fits = trace(mesh={"tp": 2}, memory={"optimizer_states": "host", "budget": budget})
    assert fits.memory().peak <= budget
    with pytest.raises(autoshard.AutoshardError, match="no plan fits a memory budget"):
        trace(mesh={"tp": 2}, memory={"budget": budget})


def test_buffers_are_a_part_of_what_a_rank_holds() -> None:
    kept = RankHolds(weights=(), activations=SavedForBackward(5, 3), buffers=7)
    found = footprint(kept, Layout(), Training())
    assert (found.activations, found.buffers, found.total) == (8, 7, 15)


def test_a_choice_for_a_weight_is_charged_for_its_update() -> None:
    """AdamW's pass over a half of 64 elements: the gradient is read, the weight and both moments
    are read and written."""
    weight = Weight(name="w", shape=(8, 8), itemsize=4, trained=True, use=0, again=True)
    axes: Any = mock.Mock(second=0.0, layout=Layout(shard=2))
    axes.weight.return_value, axes.took.return_value = weight, 0.0
    with (
        mock.patch.object(BatchAxis, "_possible", lambda *_: [TWICE]),
        mock.patch.object(asked, "_is_read_in_backward", lambda node: True),
    ):
        charged = BatchAxis(axes=axes, bandwidth=100.0).charges(mock.Mock(), "I", 0.0)
    assert charged == {TWICE: pytest.approx(32 * 4 * (1 + 2 * 3) / 100.0)}
