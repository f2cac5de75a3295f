"""Precision: the dtypes of computation and of gradient reductions."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

_DTYPES = {str(d).removeprefix("torch."): d for d in (torch.float64, torch.float32, torch.bfloat16)}
_DTYPES["float16"] = torch.float16


@dataclasses.dataclass(frozen=True)
class Precision:
    """What a model stored in one dtype (fp32, usually) is computed and reduced in.

    param: parameters are gathered, and computed with, in this dtype; the model is traced as if its
        parameters had it. None: as they are stored. Inputs and buffers are left alone: floating
        inputs come from the caller in the dtype that the model's operators accept.
    reduce: gradients travel over the data-parallel axes in this dtype; None: the dtype of compute.
    accumulate: the ranks' gradients are summed in this dtype; None: whatever the collective does.
        Where it differs from `reduce`, they move by an all-to-all and each rank sums its part.

    Gradients and optimizer state always have the dtype of the stored parameter. The names are
    those of FSDP2's MixedPrecisionPolicy without `_dtype`; dtypes may be given by name.
    """

    param: torch.dtype | None = None
    reduce: torch.dtype | None = None
    accumulate: torch.dtype | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, _dtype(getattr(self, field.name)))

    @staticmethod
    def of(value: Precision | Mapping[str, Any] | None) -> Precision:
        """From the value of the option. Raises TypeError or ValueError where it is not allowed."""
        return value if isinstance(value, Precision) else Precision(**dict(value or {}))

    @staticmethod
    def accepts(value: Any) -> bool:
        """Whether `of` takes the value."""
        try:
            Precision.of(value)
        except (TypeError, ValueError):
            return False
        return True


def _dtype(value: Any) -> torch.dtype | None:
    if value is None or value in _DTYPES.values():
        return value
    if isinstance(value, str) and value in _DTYPES:
        return _DTYPES[value]
    raise ValueError(f"{value!r} is not one of {', '.join(_DTYPES)}")
