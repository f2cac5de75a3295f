"""Meshes: axes in order, groups behind them, and what is said where sizes do not fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from autoshard.runtime import compat
from autoshard.runtime.collectives.axis import Axis
from autoshard.runtime.collectives.redistribution import all_gather
from autoshard.runtime.errors import ConfigError
from autoshard.runtime.mesh import groups_of, home_mesh, init_mesh, offline_mesh
from autoshard.runtime.pipeline import GroupChannel
from gloo_pool import GlooPool


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


def test_one_process_needs_no_process_group() -> None:
    for sizes in ({"tp": 1}, {}, None):
        mesh = init_mesh(sizes, "cpu")
        assert mesh.axis("tp") == Axis("tp", 1, 0, "") == mesh.axis("tp")
        assert mesh.device_mesh is None and mesh.size == 1
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ({"tp": 2}, r"the mesh tp 2 needs 2 processes, and there are 1\. .*nproc-per-node=2"),
        ({"tp": 4, "dp_shard": 2}, r"dp_shard 2 x tp 4 needs 8 processes, and there are 1"),
        (
            {"xp": 1},
            r"unknown mesh axis 'xp'\. The axes are pp, dp_replicate, dp_shard, ep, cp, tp\.",
        ),
        ({"tp": 0}, r"mesh axis tp has size 0\. A size is a positive number"),
        ({"tp": True}, r"mesh axis tp has size True"),
    ],
)
def test_sizes_that_do_not_fit(sizes: dict[str, int], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        init_mesh(sizes, "cpu")


def test_offline_ranks_are_those_of_a_device_mesh() -> None:
    sizes = {"tp": 3, "dp_replicate": 2, "dp_shard": 2}
    grid = torch.arange(12).view(2, 2, 3)
    for rank in range(12):
        mesh = offline_mesh(sizes, rank)
        assert [axis.name for axis in mesh.axes] == ["dp_replicate", "dp_shard", "tp"]
        assert [axis.rank for axis in mesh.axes] == (grid == rank).nonzero()[0].tolist()
        assert mesh.size == 12 and mesh.device_mesh is None
    with pytest.raises(ConfigError, match=r"rank 12 is not in a mesh of 12\. Give 0 <= rank < 12"):
        offline_mesh(sizes, 12)


def run_meshes() -> list[Any]:
    mesh = init_mesh({"tp": 2, "dp_shard": 2}, "cpu")  # starts the process group
    rank = dist.get_rank()
    assert dist.get_backend() == "gloo"
    assert init_mesh({"dp_shard": 2, "tp": 2}, "cpu") is mesh
    assert init_mesh(None, "cpu").axis("tp").size == 4
    names = [axis.name for axis in mesh.axes]
    assert names == ["dp_shard", "tp"] == list(mesh.device_mesh.mesh_dim_names)
    assert mesh.axis("dp_replicate").size == 1
    assert [axis.rank for axis in mesh.axes] == [rank // 2, rank % 2]
    gathered = [all_gather(torch.tensor([rank]), axis).tolist() for axis in mesh.axes]

    given = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    assert init_mesh(given, "cpu") is init_mesh(given, "cpu")
    assert init_mesh(given, "cpu").device_mesh is given
    for wrong, text in (
        (init_device_mesh("cpu", (4,)), r"of shape \(4,\) has no axis names"),
        (init_device_mesh("cpu", (4,), mesh_dim_names=("x",)), "unknown mesh axis 'x'"),
        (
            init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp_shard")),
            "axes of the DeviceMesh are tp, dp_shard",
        ),
        ({"tp": 2}, "needs 2 processes, and there are 4"),
    ):
        with pytest.raises(ConfigError, match=text):
            init_mesh(wrong, "cpu")
    return gathered


def test_groups_of_each_axis(gloo4: GlooPool) -> None:
    assert gloo4(run_meshes) == [
        [[0, 2], [0, 1]],
        [[1, 3], [0, 1]],
        [[0, 2], [2, 3]],
        [[1, 3], [2, 3]],
    ]


def test_a_new_world_has_groups_of_its_own() -> None:
    """Also where its objects lie where those of the last one lay, and its meshes are equal."""
    for _ in range(4):
        dist.init_process_group("fake", rank=0, world_size=4)
        try:
            given = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
            for mesh in (init_mesh({"pp": 2, "tp": 2}, "cpu"), init_mesh(given, "cpu")):
                channel = GroupChannel(mesh.axes[0], torch.device("cpu"), groups_of(mesh, "pp"))
                homes = home_mesh(mesh.device_mesh, 1).get_all_groups()
                for group in (*channel.groups, *homes, *map(_group_of, mesh.axes)):
                    assert compat.process_group(group.group_name) is group
        finally:
            dist.destroy_process_group()


def _group_of(axis: Axis) -> Any:
    return compat.process_group(axis.group)
