"""A model's parameters as exporters read them: one at a time, whole or stored as shards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autoshard.export.errors import ALONE, export_error
from autoshard.export.serial_graph import unwrapped
from autoshard.runtime import compat
from autoshard.runtime.agreement import world_axis
from autoshard.runtime.collectives import Axis
from autoshard.runtime.mesh import axes_of
from autoshard.runtime.parameters import local_bounds, stored_states, unshard_parameter

Region = Callable[[tuple[int, ...]], list[tuple[int, int]]]
"""A region of a parameter that somebody will take: of the parameter's shape, for each dim the first
index that is needed and one past the last."""


def whole(shape: tuple[int, ...]) -> list[tuple[int, int]]:
    """All of a parameter, as a region."""
    return [(0, size) for size in shape]


@dataclass(frozen=True)
class Block:
    """A block of a parameter: the tensor, and the index in each dim at which it begins."""

    tensor: torch.Tensor
    starts: tuple[int, ...]


class WeightSource:
    """The parameters of a model in one process, or in a job of many.

    job: the processes that export together, all of the running world. A model without stored
    shards is exported by the process that calls, alone. gathered: names of parameters that had to
    be made whole, in order.
    """

    def __init__(self, model: nn.Module) -> None:
        self.parameters = dict(unwrapped(model).named_parameters())
        shared = any(isinstance(p, DTensor) for p in self.parameters.values())
        self.job = world_axis() if shared else ALONE
        self.gathered: list[str] = []
        buffers = dict(unwrapped(model).named_buffers())
        for kind, tensors in (("parameter", self.parameters), ("buffer", buffers)):
            for name, tensor in tensors.items():
                if tensor.is_meta:
                    raise export_error(
                        f"{kind} {name} is on the meta device: it has no values to write"
                    )

    def read(self, name: str, wanted: Sequence[Sequence[Region]]) -> Block:
        """What this rank holds of a parameter, where that is enough for every rank, else all of it.

        wanted: for each rank of the job, the regions it will take. Collective over the model's
        mesh where the parameter is sharded; at most this one parameter is whole at a time.
        """
        parameter = self.parameters[name]
        if not isinstance(parameter, DTensor):
            return Block(parameter.detach(), (0,) * parameter.dim())
        if all(
            _covers(self._bounds(parameter, rank), region(tuple(parameter.shape)))
            for rank, regions in enumerate(wanted)
            for region in regions
        ):
            starts = tuple(start for start, _ in self._bounds(parameter, self.job.rank))
            return Block(compat.local_of(parameter).detach(), starts)
        self.gathered.append(name)
        with torch.no_grad():
            return Block(unshard_parameter(parameter).detach(), (0,) * parameter.dim())

    @staticmethod
    def _bounds(parameter: DTensor, rank: int) -> list[tuple[int, int]]:
        """(first, one past the last) index of a rank's part, for each dim."""
        mesh, states = parameter.device_mesh, stored_states(parameter)
        place = (mesh.mesh == rank).nonzero()
        if len(place) == 0:
            return [(0, 0)] * parameter.dim()
        coordinates = place[0].tolist()
        axes = [
            Axis(axis.name, axis.size, coordinates[i], "") for i, axis in enumerate(axes_of(mesh))
        ]
        return local_bounds(parameter.shape, states, axes)


def _covers(held: list[tuple[int, int]], needed: list[tuple[int, int]]) -> bool:
    return all(
        low <= first and last <= high
        for (low, high), (first, last) in zip(held, needed, strict=True)
        if first < last
    )
