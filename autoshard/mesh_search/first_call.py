"""The mesh of a process that was given none: searched at its first call, and kept.

Whether ranks may share a batch by tensor parallelism, the batches themselves say: at the first
call every rank hashes its own. Ranks that hold different batches are data-parallel ranks; tp is
only considered among neighbours that hold the same one. Rank 0 then searches the meshes that are
left (search.py) for the machine it finds itself on, and every rank takes its answer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autoshard.capture import capture
from autoshard.config import Config, Precision
from autoshard.errors import PlanError
from autoshard.mesh_search.factorisations import candidates
from autoshard.mesh_search.prices import MeshPrice
from autoshard.mesh_search.search import search_captured
from autoshard.parameters import lowered_dtypes
from autoshard.planning import Plan
from autoshard.planning.cost import Cluster, cluster_of
from autoshard.runtime import compat
from autoshard.runtime.agreement import from_first, gather, world_axis
from autoshard.runtime.mesh import start_world
from autoshard.runtime.parameters import is_planned


@dataclass(frozen=True)
class Choice:
    """A mesh and one line that says where it comes from; "" where the caller gave it."""

    mesh: DeviceMesh | Mapping[str, int] | None
    line: str = ""


@compat.once_a_world
def _chosen() -> dict[str, Choice]:
    """By kind of device."""
    return {}


def choose(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    inputs: list[compat.GraphInput],
    config: Config,
    device: str,
    batch: Sequence[Any] | None = None,
) -> Choice:
    """The mesh to run on: the caller's, the plan's, or the one chosen at the first call.

    batch: the tensors whose values tell ranks apart; None: the graph's inputs that are not the
    model's. Collective in the whole world at the first call without a mesh. One mesh serves a
    process, whatever it compiles later. Raises PlanError on every rank where no mesh fits.
    """
    if config.mesh is not None:
        return Choice(config.mesh)
    if config.plan is not None:
        plan = config.plan if isinstance(config.plan, Plan) else Plan.load(Path(config.plan))
        return Choice(plan.mesh or None)
    for item in inputs:
        real = item.real
        if isinstance(real, nn.Parameter) and isinstance(real, DTensor) and is_planned(real):
            kept = [one for one in _chosen().values() if _is_of(real.device_mesh, one)]
            return kept[0] if kept else Choice(real.device_mesh)
    world = start_world(device)
    if world == 1:
        return Choice(None)
    chosen = _chosen()
    if device not in chosen:
        if batch is None:
            batch = [i.real for i in inputs if not i.of_model]
        chosen[device] = _search(gm, example_inputs, inputs, config, device, batch)
    return chosen[device]


def _is_of(mesh: DeviceMesh, choice: Choice) -> bool:
    sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape))
    return bool(choice.line) and sizes == choice.mesh


def _search(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    inputs: list[compat.GraphInput],
    config: Config,
    device: str,
    batch: Sequence[Any],
) -> Choice:
    machine = cluster_of(device)
    world = world_axis()
    said = [digest(batch), machine.device.memory_bytes]
    found = gather(said, "choice of a mesh", world, alike=True)
    smallest = min(size for _, size in found)
    machine = replace(machine, device=replace(machine.device, memory_bytes=smallest))
    answer = None
    if world.rank == 0:  # if it fails, the others raise in `from_first`
        digests = [one for one, _ in found]
        captured = capture(gm, example_inputs, lowered_dtypes(inputs))
        answer = _best(captured, inputs, config, machine, digests)
    mesh, line = from_first(answer, "choice of a mesh", world)
    return Choice(mesh, line)


def _best(
    captured: fx.GraphModule,
    inputs: list[compat.GraphInput],
    config: Config,
    machine: Cluster,
    digests: Sequence[str],
) -> tuple[dict[str, int], str]:
    """Rank 0's answer: the mesh, and the line that explains it."""
    world = len(digests)
    in_float8 = Precision.of(config.precision).matmul is not None  # which ep does not know
    every = candidates(world, machine, ("tp",) if in_float8 else ("tp", "ep"))
    meshes = [mesh for mesh in every if _shares(mesh.get("tp", 1), digests)]
    found = search_captured(captured, inputs, meshes, machine, config, batches=len(set(digests)))
    best = found.best
    if best is None:
        least = min(found.rows, key=lambda row: row.memory.total)
        raise PlanError(
            f"no mesh of {world} ranks fits: the smallest is {_told(least)}: {least.unfit}",
            remedy="Use more ranks or a smaller batch; options={'mesh': ...} skips this check.",
        )
    kind = "the same batch" if len(set(digests)) == 1 else f"{len(set(digests))} different batches"
    others = [row for row in found.rows if row is not best]
    told = "; ".join(_told(row) for row in others[:4]) or "none"
    more = f"; {len(others) - 4} more" if len(others) > 4 else ""
    return best.mesh, (
        f"mesh chosen for {world} ranks ({machine.name}) that hold {kind}: {_told(best)}; "
        f"alternatives: {told}{more}"
    )


def _told(row: MeshPrice) -> str:
    sizes = " ".join(f"{name}={size}" for name, size in row.mesh.items())
    return f"{sizes} {1e3 * row.timing.step:.3g} ms{'' if row.fits else ' (does not fit)'}"


def _shares(tp: int, digests: Sequence[str]) -> bool:
    """Whether each group of `tp` neighbours holds one batch."""
    groups = [digests[i : i + tp] for i in range(0, len(digests), tp)]
    return all(len(set(group)) == 1 for group in groups)


def digest(batch: Sequence[Any]) -> str:
    """Equal for equal tensors; what has no values to read is never equal to another rank's."""
    text = hashlib.sha256()
    for value in batch:
        if not isinstance(value, torch.Tensor) or isinstance(value, nn.Parameter):
            continue
        text.update(f"{value.dtype} {tuple(value.shape)}".encode())
        if type(value) is not torch.Tensor or value.is_meta:
            return f"unknown on rank {dist.get_rank() if dist.is_initialized() else 0}"
        flat = value.detach().cpu().contiguous().reshape(-1)
        text.update(flat.view(torch.uint8).numpy().tobytes())
    return text.hexdigest()
