"""The device mesh: axes by name, the process group behind them, or neither of them offline."""

import atexit
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autoshard.runtime import compat
from autoshard.runtime.agreement import agree, limit_group, restarts, world_axis
from autoshard.runtime.collectives import DATA_AXES, Axis, outer_axis
from autoshard.runtime.errors import ConfigError

AXIS_ORDER = ("pp", "dp_replicate", "dp_shard", "ep", "cp", "tp")
"""Outermost first: ranks next to each other share the tp axis, which communicates most."""

PLANNED = ("cp", "tp")
"""The axes on which the planner decides what each rank does with the batch that all are given."""

SAME_BATCH = ("pp", *PLANNED)
"""The axes whose ranks are given the same batch."""

_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_LIMIT = timedelta(minutes=10)  # of collectives, and of what `timeout` says where it is not given
_HOME = ":"


@dataclass(frozen=True)
class Mesh:
    """The axes of the mesh as this rank sees them, in the order of AXIS_ORDER.

    device_mesh: torch's mesh of the same axes; None in a world of one process, and offline.
    """

    axes: tuple[Axis, ...]
    device_mesh: DeviceMesh | None

    @property
    def sizes(self) -> dict[str, int]:
        """Ranks by axis name."""
        return {axis.name: axis.size for axis in self.axes}

    def axis(self, name: str) -> Axis:
        """The axis of that name; one of size 1 where the mesh has none."""
        for axis in self.axes:
            if axis.name == name:
                return axis
        return Axis(name, 1, 0, "")

    @property
    def planned(self) -> Axis:
        """The axis that programs are planned on last: tp, or cp where tp has one rank."""
        cp = self.axis("cp")
        return cp if cp.size > 1 and self.outer is None else self.axis("tp")

    @property
    def outer(self) -> Axis | None:
        """The axis that is planned before `planned`: cp, where it stands beside tp or pp."""
        return outer_axis(self.axes)

    @property
    def sharing(self) -> tuple[Axis, ...]:
        """The axes whose ranks are given the same batch, outermost first; at least one."""
        return (self.planned,) if self.outer is None else (self.outer, self.planned)

    @property
    def batches(self) -> int:
        """The number of different batches."""
        same = (self.axis("pp"), *self.sharing)
        return self.size // math.prod(axis.size for axis in same)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return math.prod(axis.size for axis in self.axes)


def init_mesh(sizes: Mapping[str, int] | DeviceMesh | None, device_type: str) -> Mesh:
    """The mesh of this process, the same object for the same sizes.

    sizes: axis sizes by name, a torch DeviceMesh with named dims, or None: every rank on `tp`.
    device_type: "cpu" (gloo), "cuda" (nccl) or another device torch knows.

    Starts the default process group from torchrun's variables where none is initialised; without
    those variables the world is this one process, and no process group is needed. Collective in
    the whole world on first use. Raises ConfigError for unknown axes, and where the sizes do not
    multiply to the number of processes.
    """
    if isinstance(sizes, DeviceMesh):
        return _of_device_mesh(sizes)
    world = start_world(device_type)
    ordered = _ordered({"tp": world} if sizes is None else sizes)
    product = math.prod(ordered.values())
    if product != world:
        spelled = " x ".join(f"{name} {size}" for name, size in ordered.items()) or "(no axes)"
        raise ConfigError(
            f"the mesh {spelled} needs {product} processes, and there are {world}",
            remedy=f"Start {product} (torchrun --nproc-per-node={product}), or give "
            f"options={{'mesh': ...}} sizes whose product is {world}.",
        )
    if not dist.is_initialized():
        return Mesh(tuple(Axis(name, 1, 0, "") for name in ordered), None)
    if not ordered:
        ordered = {"tp": 1}
    return _limited(_made(device_type, tuple(ordered.items())))


@compat.once_a_world
def _made(device_type: str, sizes: tuple[tuple[str, int], ...]) -> Mesh:
    """The mesh of all processes. Collective in the whole world."""
    lines = [*(f"{name} {size}" for name, size in sizes), device_type]
    agree("mesh", " ".join(lines), lines, world_axis())
    names, extents = zip(*sizes, strict=True)
    mesh = init_device_mesh(device_type, extents, mesh_dim_names=names)
    return Mesh(axes_of(mesh), mesh)


@compat.once_a_world
def _of(device_mesh: DeviceMesh) -> Mesh:
    return Mesh(axes_of(device_mesh), device_mesh)


def groups_of(mesh: Mesh, name: str) -> tuple[tuple[int, ...], ...]:
    """The ranks of each group of the axis of that name, of a mesh with processes: on all the same.

    What makes groups of its own has to make all of them, on every rank.
    """
    device_mesh = mesh.device_mesh
    assert device_mesh is not None
    at = (device_mesh.mesh_dim_names or ()).index(name)
    grid = device_mesh.mesh.movedim(at, -1)
    return tuple(map(tuple, grid.reshape(-1, grid.shape[-1]).tolist()))


def data_coordinate(mesh: Mesh) -> int:
    """This rank's index among the ranks that hold different batches."""
    index = 0
    for axis in mesh.axes:
        if axis.name in DATA_AXES:
            index = index * axis.size + axis.rank
    return index


def offline_mesh(sizes: Mapping[str, int], rank: int) -> Mesh:
    """The mesh as rank `rank` would see it, with no process group: collectives can be traced, not
    run. Raises ConfigError for unknown axes and for a rank outside the mesh."""
    ordered = _ordered(sizes)
    total = math.prod(ordered.values())
    if not 0 <= rank < total:
        raise ConfigError(
            f"rank {rank} is not in a mesh of {total}", remedy=f"Give 0 <= rank < {total}."
        )
    axes: list[Axis] = []
    for name, size in reversed(ordered.items()):
        axes.append(Axis(name, size, rank % size, f"offline:{name}"))
        rank //= size
    return Mesh(tuple(reversed(axes)), None)


@compat.once_a_world
def axes_of(device_mesh: DeviceMesh) -> tuple[Axis, ...]:
    """The axes of a torch mesh as this rank sees them, in the mesh's order.

    torch numbers the groups of a world, so that the groups of an axis differ in name, and with them
    the graphs that name them: they get one name, of the axis, by which compiled graphs are shared.
    """
    own = device_mesh.mesh_dim_names or ()
    names, sizes = [name.partition(_HOME)[0] for name in own], device_mesh.shape
    spelled = " x ".join(f"{name} {size}" for name, size in zip(names, sizes, strict=True))
    axes = []
    for name, known, size in zip(names, own, sizes, strict=True):
        group = device_mesh.get_group(known)
        called = str(group.group_name)
        if size < device_mesh.size():
            called = compat.name_group(group, f"{name} of {spelled}")
        axes.append(Axis(name, size, device_mesh.get_local_rank(known), called))
    return tuple(axes)


@compat.once_a_world
def home_mesh(device_mesh: DeviceMesh, rank: int) -> DeviceMesh:
    """The same mesh for tensors that are at home on a rank of pp; the name of the axis says so.

    DTensor has no placement for it. Of the same groups, so that nobody need agree on it.
    """
    names = device_mesh.mesh_dim_names or ()
    own = tuple(f"pp{_HOME}{rank}" if home_of_name(n) is not None else n for n in names)
    if own == names:
        return device_mesh
    groups = [device_mesh.get_group(name) for name in names]
    return DeviceMesh.from_group(
        groups[0] if len(groups) == 1 else groups,
        device_mesh.device_type,
        mesh=device_mesh.mesh,
        mesh_dim_names=own,
    )


def home_of_name(name: str) -> int | None:
    """The home in the name of an axis of a tensor's mesh: -1: pp without one; None: no pp."""
    axis, _, rank = name.partition(_HOME)
    return (int(rank) if rank else -1) if axis == "pp" else None


def _of_device_mesh(device_mesh: DeviceMesh) -> Mesh:
    names = device_mesh.mesh_dim_names
    if names is None:
        raise ConfigError(
            f"the DeviceMesh of shape {tuple(device_mesh.shape)} has no axis names",
            remedy=f"Create it with mesh_dim_names, from {', '.join(AXIS_ORDER)}.",
        )
    if tuple(_ordered(dict(zip(names, device_mesh.shape, strict=True)))) != tuple(names):
        raise ConfigError(
            f"the axes of the DeviceMesh are {', '.join(names)}",
            remedy=f"Create it with its axes in the order {', '.join(AXIS_ORDER)}.",
        )
    if device_mesh.get_coordinate() is None:
        raise ConfigError(
            f"rank {dist.get_rank()} is not in the DeviceMesh {device_mesh}",
            remedy="Compile only on the ranks of the mesh.",
        )
    return _limited(_of(device_mesh))


def _limited(mesh: Mesh) -> Mesh:
    """The mesh, the collectives of whose axes wait no longer than `timeout`.

    init_device_mesh gives sub-groups torch's default, whatever the limit of the world's own group.
    """
    for axis in mesh.axes:
        limit_group(axis.group)
    return mesh


def _ordered(sizes: Mapping[str, int]) -> dict[str, int]:
    unknown = [name for name in sizes if name not in AXIS_ORDER]
    if unknown:
        raise ConfigError(
            f"unknown mesh axis {unknown[0]!r}", remedy=f"The axes are {', '.join(AXIS_ORDER)}."
        )
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ConfigError(
                f"mesh axis {name} has size {size!r}",
                remedy="A size is a positive number of processes.",
            )
    return {name: sizes[name] for name in AXIS_ORDER if name in sizes}


def world_size() -> int:
    """The number of processes, whether or not they have a process group yet."""
    if dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ["WORLD_SIZE"]) if all(map(os.environ.get, _TORCHRUN)) else 1


def start_world(device_type: str) -> int:
    """The number of processes; starts the default process group where torchrun asks for one."""
    if not dist.is_initialized():
        if not all(map(os.environ.get, _TORCHRUN)):
            return 1
        if device_type == "cpu":
            backend = "gloo"
        else:
            # Must precede the first collective, or every process uses device 0.
            torch.get_device_module(device_type).set_device(int(os.environ.get("LOCAL_RANK", 0)))
            native = dist.get_default_backend_for_device(device_type)
            backend = f"cpu:gloo,{device_type}:{native}"
        dist.init_process_group(backend, timeout=_LIMIT, **_of_this_start())
        atexit.register(_destroy_process_group, os.getpid())
    return dist.get_world_size()


def _of_this_start() -> dict[str, Any]:
    """The store in which processes that torchrun has started again do not meet the addresses of
    those that ended: it keeps one for all starts, and torch looks for addresses there."""
    number = restarts()
    if not number:
        return {}
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(host, port, size, is_master=False, timeout=_LIMIT)
    own = dist.PrefixStore(f"autoshard/start/{number}", store)
    return {"store": own, "rank": rank, "world_size": size}


def _destroy_process_group(process: int) -> None:
    if os.getpid() == process and dist.is_initialized():
        dist.destroy_process_group()
