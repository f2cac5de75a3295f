"""What engines are made for: the options that every exporter of rank graphs takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autoshard.export.errors import export_error

DIMS = ("batch", "sequence")
"""Names of the first dims of the inputs, which may vary."""

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}

Example = tuple[Sequence[Any], Mapping[str, Any]]
"""A call of the model: (args, kwargs)."""


@dataclass(frozen=True)
class Extent:
    """The sizes a dynamic dim may have."""

    minimum: int
    optimum: int
    maximum: int


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """The options of `autoshard.export.tensorrt` that say what a model is planned for.

    mesh: {"tp": n}. example: (args, kwargs) of one call, of which shapes and dtypes count; None:
    token ids [2, 8]. dtype: of the weights, of inputs that are floating-point numbers and so of
    the computation; None: as they are. dynamic: (minimum, optimum, maximum) of "batch", dim 0 of
    every input, and of "sequence", dim 1; a size that is not named is that of the example.
    max_length: tokens of a key-value cache, None for none. hardware: the machine to plan for, a
    key of `planning.cost.hardware.HARDWARE`.

    Raises ExportError for values that no engine can have.
    """

    mesh: Mapping[str, int]
    example: Example | None = None
    dtype: str | torch.dtype | None = None
    dynamic: Mapping[str, tuple[int, int, int]] | None = None
    max_length: int | None = None
    hardware: str = "h100"

    def __post_init__(self) -> None:
        _ = self.tp, self.weight_dtype, self.extents

    @property
    def tp(self) -> int:
        """The number of ranks."""
        why = "an engine communicates in one process group, that of the axis tp"
        remedy = "Give mesh={'tp': n}; replicas of a server each load the same engines."
        return axis_sizes(self.mesh, ("tp",), why, remedy)[0]

    @property
    def weight_dtype(self) -> torch.dtype | None:
        """The type of the weights; None: as they are."""
        return None if self.dtype is None else weight_dtype(self.dtype)

    @property
    def extents(self) -> dict[str, Extent]:
        """The sizes of each dynamic dim, by its name."""
        return {name: _extent(name, sizes) for name, sizes in (self.dynamic or {}).items()}


def axis_sizes(
    mesh: Mapping[str, int], axes: Sequence[str], why: str, remedy: str
) -> tuple[int, ...]:
    """The size of each of `axes`, 1 where the mesh has none; of others only size 1 is accepted.

    why, remedy: what the error says of another axis.
    """
    for name, size in mesh.items():
        if name not in axes and size != 1:
            raise export_error(f"mesh axis {name} of size {size}: {why}", remedy=remedy)
    sizes = tuple(mesh.get(name, 1) for name in axes)
    for name, size in zip(axes, sizes):
        if not isinstance(size, int) or size < 1:
            raise export_error(f"mesh axis {name} has size {size!r}, not an integer from 1")
    return sizes


def weight_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """The type that weights are written in, by its name or itself."""
    found = DTYPES.get(str(dtype).removeprefix("torch."))
    if found is None:
        raise export_error(
            f"dtype {dtype!r} cannot be written", remedy=f"Give {', '.join(DTYPES)}."
        )
    return found


def _extent(name: str, sizes: tuple[int, int, int]) -> Extent:
    if name not in DIMS:
        raise export_error(f"dynamic size {name!r} is not known; there are {', '.join(DIMS)}")
    low, best, high = sizes
    if not 1 <= low <= best <= high:
        bounds = "1 <= minimum <= optimum <= maximum"
        raise export_error(f"dynamic {name} {tuple(sizes)}: give {bounds}")
    return Extent(low, best, high)
