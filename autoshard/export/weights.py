"""A model's parameters as exporters read them: one at a time, whole or stored as shards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from autoshard.export.errors import export_error
from autoshard.export.serial_graph import unwrapped
from autoshard.runtime import compat
from autoshard.runtime.collectives import Axis
from autoshard.runtime.mesh import axes_of
from autoshard.runtime.parameters import local_bounds, materialize, stored_states


class Wanted(Protocol):
    """A piece of a parameter, as far as what it needs of it."""

    def needs(self, shape: tuple[int, ...]) -> list[tuple[int, int]]:
        """For each dim of the parameter, the first index it needs and one past the last."""
        ...


@dataclass(frozen=True)
class Part:
    """A part of a parameter: the tensor, and the index in each dim at which it begins."""

    tensor: torch.Tensor
    starts: tuple[int, ...]


class Memory:
    """The parameters of a model in one process, or in a job of many.

    world, rank: of the processes that export together. A model without stored shards is exported
    by the process that calls, alone: (1, 0). gathered: names of parameters that had to be made
    whole, in order.
    """

    def __init__(self, model: nn.Module) -> None:
        self.parameters = dict(unwrapped(model).named_parameters())
        shared = any(isinstance(p, DTensor) for p in self.parameters.values())
        self.world = dist.get_world_size() if shared else 1
        self.rank = dist.get_rank() if shared else 0
        self.gathered: list[str] = []
        for name, parameter in self.parameters.items():
            if parameter.is_meta:
                raise export_error(
                    f"parameter {name} is on the meta device: it has no values to write"
                )

    def read(self, name: str, wanted: Sequence[Sequence[Wanted]]) -> Part:
        """What this rank holds of a parameter, where that is enough for every rank, else all of it.

        wanted: for each rank, the pieces it will take. Collective over the model's mesh where the
        parameter is sharded; at most this one parameter is whole at a time.
        """
        parameter = self.parameters[name]
        if not isinstance(parameter, DTensor):
            return Part(parameter.detach(), (0,) * parameter.dim())
        if all(
            _covers(self._bounds(parameter, rank), piece.needs(tuple(parameter.shape)))
            for rank, pieces in enumerate(wanted)
            for piece in pieces
        ):
            starts = tuple(start for start, _ in self._bounds(parameter, self.rank))
            return Part(compat.local_of(parameter).detach(), starts)
        return self.whole(name)

    def whole(self, name: str) -> Part:
        """All of a parameter, on every rank: gathered where it is sharded (collective)."""
        parameter = self.parameters[name]
        if isinstance(parameter, DTensor):
            self.gathered.append(name)
        with torch.no_grad():
            return Part(materialize(parameter).detach(), (0,) * parameter.dim())

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
