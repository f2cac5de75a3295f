"""One description of the machine: what a file says or a process finds is what every price is of.

What a plan is charged where collectives are one operator with the products beside them.

How much a bucket holds where the caller says nothing.
"""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import autoshard
from autoshard.building.pipeline import program as pipelines
from autoshard.explain.alternatives import alternatives
from autoshard.mesh_search import MeshPrice
from autoshard.passes.lib.bucketing import ALL_GATHER, WAIT, Member, bucket_size, fill, member
from autoshard.planning.cost import START_SECONDS, Fusing, clusters, fusing_for
from autoshard.planning.cost.clusters import Cluster, cluster
from autoshard.planning.cost.machines import Efficiency
from autoshard.planning.estimate import Layout, Training, profile, timing
from autoshard.planning.estimate.operator_time import OperatorTimes
from autoshard.planning.estimate.traffic import seconds
from autoshard.planning.prices import AxisPrices
from autoshard.program import Program
from finished_ranks import Layers, layers, megatron

BODY: dict[str, Any] = {
    "name": "h100",  # the name of a built-in machine, of which nothing else is that one's
    "kind": "cpu",
    "devices_per_node": 4,
    "memory": {"gigabytes": 6, "gigabytes_per_second": 1000},
    "tera_flops": {"float8": 40, "half": 20, "float32": 10, "float64": 5},
    "inside": {"microseconds": 3, "gigabytes_per_second": 100},
    "between": {"microseconds": 7, "gigabytes_per_second": 10},
    "host": {"microseconds": 10, "gigabytes_per_second": 20},
    "efficiency": {"compute": 0.31, "memory": 0.6, "links": 0.5, "fits": 0.7, "overlap": 0.4},
}


@pytest.fixture
def described(tmp_path: Path) -> str:
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(BODY))
    return str(path)


class WithLoss(nn.Module):
    """A model that ends in its loss, as a pipeline wants it."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)]
        self.inner = nn.Sequential(*layers, *layers[:2], nn.Linear(256, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.inner(x).square().mean()
        return loss


def made() -> tuple[nn.Module, tuple[torch.Tensor]]:
    torch.compiler.reset()
    with torch.device("meta"):
        return WithLoss(), (torch.empty(65536, 64),)


def searched(mesh: dict[str, int], **options: Any) -> tuple[MeshPrice, ...]:
    return autoshard.search_meshes(*made(), world=8, mesh=mesh, **options).rows


def is_of(machine: Cluster, known: Cluster) -> bool:
    return all(getattr(machine, f.name) == getattr(known, f.name) for f in fields(Cluster))


def test_a_described_machine_reaches_every_price(
    described: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, mesh, staged = cluster(described), {"dp_shard": 2, "tp": 4}, {"pp": 2, "tp": 4}
    monkeypatch.setattr(clusters, "HARDWARE", {})  # none is known by its name
    planner, estimates = (
        mock.patch.object(kind, "__init__", autospec=True, side_effect=kind.__init__)
        for kind in (AxisPrices, OperatorTimes)
    )
    with planner as charged, estimates as timed:
        free = autoshard.trace(*made(), mesh=mesh, hardware=described)
        first, (row,) = alternatives(free)[0], searched(mesh, hardware=described)
        budget = int(0.9 * row.memory.total)
        (less,) = searched(mesh, hardware=described, memory={"budget": budget})
        searched(staged, hardware=described)
        with mock.patch.object(pipelines, "plan_stages", side_effect=pipelines.plan_stages) as cut:
            autoshard.trace(*made(), mesh=staged, hardware=described)
    assert less.recomputation is not None
    of = [call.args[2] for call in charged.call_args_list]
    of += [call.args[3] for call in timed.call_args_list]
    assert len(of) > 20 and all(is_of(one, known) for one in of)
    # four ranks of tp fill a node, so that dp_shard crosses to the next, and pp
    links = free.machine.links
    assert links["tp"] == known.inside
    assert links["dp_shard"] == known.link(2, 4) != known.inside
    assert first.timing == row.timing
    assert cut.call_args.args[2].links["pp"] == known.link(2, 4)


def test_a_detected_machine_is_alike_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun may start more ranks on one node than on another."""
    for here in ("4", "2"):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", here)
        monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
        monkeypatch.setenv("WORLD_SIZE", "6")
        model = WithLoss()
        program = autoshard.trace(model, (torch.randn(64, 64),), mesh={"dp_shard": 2, "tp": 3})
        machine = program.machine
        assert (machine.per_node, machine.efficiency) == (3, Efficiency(fits=0.8))
        assert machine.links["tp"] == machine.inside != machine.links["dp_shard"]


def test_the_option_is_obeyed_by_device_and_machine() -> None:
    h100 = cluster("h100")
    assert fusing_for("auto", True, 8, h100) == Fusing()
    assert fusing_for("auto", False, 8, h100) is None, "on CPUs"
    assert fusing_for("auto", True, 16, h100) is None, "over two machines"
    assert fusing_for(True, False, 16, h100) == Fusing(always=True)
    assert fusing_for(False, True, 8, h100) is None


def test_the_longer_of_the_two_is_charged() -> None:
    for communication, products in ((3e-4, 1e-4), (1e-4, 3e-4)):
        spared = Fusing().gain(communication, products)
        assert communication + products - spared == pytest.approx(3e-4 + START_SECONDS)
    assert Fusing().gain(1e-5, 1e-3) == 0.0 > Fusing(always=True).gain(1e-5, 1e-3)


def test_a_step_spares_what_each_fused_collective_does() -> None:
    build, _ = layers(Layers(512), (1, 2048, 512))
    plan = megatron(build, 2, sequence=True)
    plain, program = (
        build({"tp": 2}, plan=plan, planner={"fuse_collectives": f}) for f in (False, True)
    )
    machine, training, layout = cluster("h100").on({"tp": 2}), Training(), Layout()
    real = machine.real_links

    def took(one: Program) -> float:
        made = profile(one.serial, one.decisions, one.parameters, 2, machine, None, training)
        return timing(made, layout, training, machine).step

    of = profile(program.serial, program.decisions, program.parameters, 2, machine, None, training)
    beside = [one for one in of.sent if one.beside]
    assert len(beside) == sum(c.fused for c in program.collectives()) == 14
    spared = [
        min(
            seconds(one._replace(copied=0), {"tp": 2}, real), sum(of.forward[i] for i in one.beside)
        )
        - START_SECONDS
        for one in beside
    ]
    assert took(plain) - took(program) == pytest.approx(sum(spared))


def gathers(count: int, width: int) -> list[Member]:
    """Gathers over two ranks of weights of `width` fp32 elements."""
    graph, found = fx.Graph(), []
    with FakeTensorMode():
        half, whole = torch.empty(width // 2), torch.empty(width)
    for i in range(count):
        source = graph.placeholder(f"w{i}")
        started = graph.call_function(ALL_GATHER, (source, 2, "dp"))
        wait = graph.call_function(WAIT, (started,))
        for node, val in ((source, half), (started, whole), (wait, whole)):
            node.meta["val"] = val
        one = member(started)
        assert one is not None
        found.append(one)
    return found


@pytest.mark.parametrize(
    ("count", "elements", "limit"),
    [
        (4, 1_000, 4 << 20),  # at least 4 MiB
        (32, 1_000_000, 16_000_000),  # an eighth of the model
        (64, 10_000_000, 160_000_000),  # at most 40 million elements
    ],
)
def test_the_default_holds_a_part_of_the_model(count: int, elements: int, limit: int) -> None:
    found = gathers(count, elements)
    assert bucket_size(found) == limit
    buckets = fill(found, None)
    assert [len(bucket) for bucket in buckets] == [min(4, count)] * max(count // 4, 1)
