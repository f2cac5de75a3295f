"""The distance of a tensor from the one that is wanted, which NaN and infinity cannot make small.

An element that is no finite number has to be the same on both sides: NaN for NaN, an infinity for
one of its sign. Anything else is infinitely far off. A largest error is taken by `furthest`: `max`
and `>` forget a NaN that does not come first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch


def difference(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """The difference of each element, in float64; of integers, 1 where they differ.

    Infinity where one side alone is no finite number, or both are and of other kinds; one element
    of infinity where shapes or dtypes differ.
    """
    if got.shape != want.shape or got.dtype != want.dtype:
        return torch.tensor(math.inf, dtype=torch.float64)
    if not (want.is_floating_point() or want.is_complex()):
        return (got != want).double()
    got, want = _reals(got), _reals(want)
    alike = (got == want) | (got.isnan() & want.isnan())
    return (got - want).masked_fill(alike, 0.0).abs().nan_to_num(math.inf, math.inf)


def finite(values: torch.Tensor) -> torch.Tensor:
    """The elements that are finite numbers, in float64, of which an error can be a share."""
    reals = _reals(values)
    return reals[reals.isfinite()]


def norm(values: torch.Tensor) -> float:
    """The 2-norm of all elements, summed in float64; infinity where one is not finite."""
    return furthest([float(_reals(values).norm())])


def largest(values: torch.Tensor) -> float:
    """The largest element by its absolute value, of none 0; infinity where one is not finite."""
    return furthest([float(_reals(values).abs().max()) if values.numel() else 0.0])


def furthest(errors: Iterable[float]) -> float:
    """The largest of some errors: infinity where one is NaN, and where there is none, since
    nothing was compared."""
    return max((math.inf if math.isnan(error) else error for error in errors), default=math.inf)


def _reals(values: torch.Tensor) -> torch.Tensor:
    """The values in float64, those of a complex tensor as its real and imaginary parts."""
    values = values.detach().resolve_conj()
    return (torch.view_as_real(values) if values.is_complex() else values).double()
