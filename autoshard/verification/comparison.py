"""A comparison: how far one side is from the other, in units a person can judge, and may be.

Every quantity is measured by the norm of its `difference`; what that is relative to, and what is
tolerated, is in `expectations` and in docs/verification.md.

The distance of a tensor from the one that is wanted, which NaN and infinity cannot make small.

An element that is no finite number has to be the same on both sides: NaN for NaN, an infinity for
one of its sign. Anything else is infinitely far off. A largest error is taken by `furthest`: `max`
and `>` forget a NaN that does not come first.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from autoshard.verification.subject import Key


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


FLOORS = {
    torch.float64: 1e-10,
    torch.float32: 1e-5,
    torch.float16: 4e-3,
    torch.bfloat16: 3e-2,
    torch.complex128: 1e-10,
    torch.complex64: 1e-5,
}
"""The smallest tolerance by the model's dtype."""
FACTOR, CEILING = 8.0, 0.25
"""A tolerance is FACTOR times the serial model's own error, at least its floor, at most CEILING."""
_BROKEN = float("inf")


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One quantity on both sides: the norm of their difference over the norm of what is wanted.

    kind: "loss", "output", "gradient", "parameter", "buffer", or "capture" (the captured graph on
    one process against the model). placement: where the parameter is stored, by axis. A gradient
    smaller than a hundredth of the largest is measured by that; a parameter by how far the step
    moved it. step counts from 1; rank is the one that was furthest off.
    """

    kind: str
    name: str
    placement: str = ""
    error: float
    tolerance: float = 0.0
    step: int = 1
    rank: int = 0

    @property
    def ok(self) -> bool:
        """Whether the error is within the tolerance; NaN is not."""
        return self.error <= self.tolerance

    @property
    def excess(self) -> float:
        """The error in units of the tolerance."""
        return furthest([self.error / max(self.tolerance, 1e-30)])


class Expected(NamedTuple):
    """What the serial model has for a key, the unit errors are measured in, and the tolerance."""

    value: torch.Tensor
    scale: float
    tolerance: float


def expectations(
    found: Mapping[Key, torch.Tensor],
    before: Mapping[Key, torch.Tensor],
    truth: Mapping[Key, torch.Tensor],
    tolerance: float | None = None,
) -> dict[Key, Expected]:
    """What to expect of a sharded run, from a serial one.

    before: the parameters before the step; they are measured by how far it moved them. truth: the
    same run in float64, as far as there is one. tolerance: of all, in place of the default.
    """
    sizes = {
        key: norm(finite(t - before[key] if key in before else t))
        for key, t in found.items()
        if t.is_floating_point() or t.is_complex()
    }
    largest = {
        kind: max([size for key, size in sizes.items() if key[0] == kind], default=0.0)
        for kind in ("gradient", "parameter")
    }
    expected: dict[Key, Expected] = {}
    for key, value in found.items():
        if key not in sizes:
            expected[key] = Expected(value, 1.0, 0.0)
            continue
        # a gradient that is nothing but rounding has no size of its own
        scale = max(sizes[key], 1e-2 * largest.get(key[0], 0.0)) or 1.0
        allowed = floor_of(value) if tolerance is None else tolerance
        if tolerance is None and key in truth and truth[key].shape == value.shape:
            exact = truth[key]
            own = norm(finite(difference(value.to(exact.dtype), exact))) / scale
            allowed = max(allowed, min(FACTOR * own, CEILING))
        if key[0] == "parameter":  # the rounding of the parameter itself
            allowed += 4 * torch.finfo(value.dtype).eps * norm(finite(value)) / scale
        expected[key] = Expected(value, scale, allowed)
    return expected


def compare(
    got: Mapping[Key, torch.Tensor],
    expected: Mapping[Key, Expected],
    stored: Mapping[str, str],
    step: int,
    rank: int,
) -> list[Comparison]:
    """A comparison for each key that either side has.

    A gradient of zeros where the serial model has none is no difference; anything else that one
    side lacks is.
    """
    found = []
    for key in dict.fromkeys((*expected, *got)):
        kind, name, _ = key
        if key not in expected:
            error = 0.0 if kind == "gradient" and not got[key].any() else _BROKEN
            tolerance = 0.0
        elif key not in got:
            error, tolerance = _BROKEN, expected[key].tolerance
        else:
            error, tolerance = _error(got[key], expected[key]), expected[key].tolerance
        found.append(
            Comparison(
                kind=kind,
                name=name,
                placement=stored.get(name, ""),
                error=error,
                tolerance=tolerance,
                step=step,
                rank=rank,
            )
        )
    return found


def _error(got: torch.Tensor, expected: Expected) -> float:
    apart = difference(got, expected.value)
    if expected.value.is_floating_point() or expected.value.is_complex():
        return norm(apart) / expected.scale
    return float(apart.sum()) / max(apart.numel(), 1)


def floor_of(value: nn.Module | torch.Tensor) -> float:
    """The smallest tolerance for a tensor, or for a model by the dtype of its parameters."""
    dtypes = (
        [value.dtype]
        if isinstance(value, torch.Tensor)
        else [p.dtype for p in value.parameters() if p.is_floating_point()]
    )
    return max((FLOORS.get(dtype, FLOORS[torch.bfloat16]) for dtype in dtypes), default=1e-5)
