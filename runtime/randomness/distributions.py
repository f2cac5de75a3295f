"""Random choices and further distributions, as functions of a seed, a call and the element.

The contract is that of the operators of randomness/draws.py, which registers these: `part` is
the rows of the whole tensor that a rank holds. The numbers have the distribution of the ATen
operator of that name; they are not its numbers.
"""

import math

import torch

from autoshard.runtime.randomness import philox
from autoshard.runtime.randomness.philox import Part


def integers(
    x: torch.Tensor,
    seed: torch.Tensor,
    low: int,
    high: int,
    call: int,
    dtype: torch.dtype | None = None,
    part: Part | None = None,
) -> torch.Tensor:
    """aten.randint of x's shape; in [low, high)."""
    found = philox.draw(x.shape, seed, call, part, 2)
    count = high - low
    if count < 1 << 31:  # the product stays below 2**63
        drawn = (found[0] * count) >> 32
    else:
        drawn = _long(found) % count
    return (drawn + low).to(dtype or x.dtype)


def permutation(
    x: torch.Tensor, seed: torch.Tensor, call: int, dtype: torch.dtype, part: Part | None = None
) -> torch.Tensor:
    """aten.randperm of len(x), by sorting random keys of 63 bits. x must be whole."""
    return _long(philox.draw(x.shape, seed, call, part, 2)).argsort(stable=True).to(dtype)


def _long(found: list[torch.Tensor]) -> torch.Tensor:
    return ((found[0] >> 1) << 32) | found[1]


def multinomial(
    p: torch.Tensor,
    seed: torch.Tensor,
    count: int,
    replacement: bool,
    call: int,
    part: Part | None = None,
) -> torch.Tensor:
    """aten.multinomial: `count` classes for each row of weights p [classes] or [rows, classes].

    One class, or classes without replacement: the largest of p / exponential (the exponential
    race, which is Gumbel's maximum). Else the inverse of the cumulative sum, in float64.
    """
    p = p.detach()
    if count == 1 or not replacement:
        wide = torch.float64 if p.dtype == torch.float64 else torch.float32
        race = p.to(wide) / philox.exponential(p.shape, seed, call, wide, part)
        return race.argmax(-1, keepdim=True) if count == 1 else race.topk(count, -1).indices
    total = p.double().cumsum(-1)
    uniform = philox.uniform((*p.shape[:-1], count), seed, call, torch.float64, part)
    # a little less than the sum, so that rounding cannot reach a last class of weight 0
    wanted = uniform * (1 - 2.0**-40) * total[..., -1:]
    return torch.searchsorted(total, wanted, right=True)


def normal_around(
    mean: torch.Tensor, seed: torch.Tensor, std: float, call: int, part: Part | None = None
) -> torch.Tensor:
    """aten.normal.Tensor_float."""
    return philox.normal(mean.shape, seed, call, mean.dtype, part) * std + mean.detach()


def normal_scaled(
    std: torch.Tensor, seed: torch.Tensor, mean: float, call: int, part: Part | None = None
) -> torch.Tensor:
    """aten.normal.float_Tensor."""
    return philox.normal(std.shape, seed, call, std.dtype, part) * std.detach() + mean


def normal_each(
    mean: torch.Tensor, std: torch.Tensor, seed: torch.Tensor, call: int, part: Part | None = None
) -> torch.Tensor:
    """aten.normal.Tensor_Tensor, of operands of one shape."""
    numbers = philox.normal(mean.shape, seed, call, mean.dtype, part)
    return numbers * std.detach() + mean.detach()


def log_normal(
    x: torch.Tensor,
    seed: torch.Tensor,
    mean: float,
    std: float,
    call: int,
    part: Part | None = None,
) -> torch.Tensor:
    """aten.log_normal of x's shape."""
    return (philox.normal(x.shape, seed, call, x.dtype, part) * std + mean).exp()


def cauchy(
    x: torch.Tensor,
    seed: torch.Tensor,
    median: float,
    sigma: float,
    call: int,
    part: Part | None = None,
) -> torch.Tensor:
    """aten.cauchy of x's shape."""
    turn = philox.uniform(x.shape, seed, call, x.dtype, part) - 0.5
    return median + sigma * torch.tan(math.pi * turn)


def geometric(
    x: torch.Tensor, seed: torch.Tensor, p: float, call: int, part: Part | None = None
) -> torch.Tensor:
    """aten.geometric of x's shape: the trials up to the first success, 1 or more."""
    if p == 1:
        return torch.ones_like(x)
    waited = philox.exponential(x.shape, seed, call, torch.float64, part)
    return (waited / -math.log1p(-p)).ceil().clamp_min(1).to(x.dtype)


def rrelu(
    x: torch.Tensor,
    seed: torch.Tensor,
    lower: float,
    upper: float,
    call: int,
    part: Part | None = None,
) -> torch.Tensor:
    """aten.rrelu in training: negative elements times a slope each, uniform in [lower, upper)."""
    slope = philox.uniform(x.shape, seed, call, x.dtype, part) * (upper - lower) + lower
    return torch.where(x <= 0, x * slope, x)


SCHEMAS = (
    (
        integers,
        "Tensor self, Tensor seed, int low, int high, int call, ScalarType? dtype=None) -> Tensor",
    ),
    (permutation, "Tensor self, Tensor seed, int call, ScalarType dtype) -> Tensor"),
    (multinomial, "Tensor self, Tensor seed, int count, bool replacement, int call) -> Tensor"),
    (normal_around, "Tensor self, Tensor seed, float std, int call) -> Tensor"),
    (normal_scaled, "Tensor self, Tensor seed, float mean, int call) -> Tensor"),
    (normal_each, "Tensor self, Tensor std, Tensor seed, int call) -> Tensor"),
    (log_normal, "Tensor self, Tensor seed, float mean, float std, int call) -> Tensor"),
    (cauchy, "Tensor self, Tensor seed, float median, float sigma, int call) -> Tensor"),
    (geometric, "Tensor self, Tensor seed, float p, int call) -> Tensor"),
    (rrelu, "Tensor self, Tensor seed, float lower, float upper, int call) -> Tensor"),
)
