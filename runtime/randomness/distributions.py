"""Random choices and further distributions, as functions of a draw and the element.

The numbers have the distribution of the ATen operator of that name; they are not its numbers.
"""

import math

import torch

from autoshard.runtime.randomness.philox import Draw, drawing

_FLOATS = "Tensor self, Tensor seed, float {}, float {}, int call) -> Tensor"


@drawing("Tensor self, Tensor seed, int low, int high, int call, ScalarType? dtype=None) -> Tensor")
def integers(
    x: torch.Tensor, draw: Draw, low: int, high: int, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """aten.randint of x's shape; in [low, high)."""
    found = draw.words(x.shape, 2)
    count = high - low
    if count < 1 << 31:  # the product stays below 2**63
        drawn = (found[0] * count) >> 32
    else:
        drawn = _long(found) % count
    return (drawn + low).to(dtype or x.dtype)


@drawing("Tensor self, Tensor seed, int call, ScalarType dtype) -> Tensor")
def permutation(x: torch.Tensor, draw: Draw, dtype: torch.dtype) -> torch.Tensor:
    """aten.randperm of len(x), by sorting random keys of 63 bits. x must be whole."""
    return _long(draw.words(x.shape, 2)).argsort(stable=True).to(dtype)


def _long(found: list[torch.Tensor]) -> torch.Tensor:
    return ((found[0] >> 1) << 32) | found[1]


@drawing("Tensor self, Tensor seed, int count, bool replacement, int call) -> Tensor")
def multinomial(p: torch.Tensor, draw: Draw, count: int, replacement: bool) -> torch.Tensor:
    """aten.multinomial: `count` classes for each row of weights p [classes] or [rows, classes].

    One class, or classes without replacement: the largest of p / exponential (the exponential
    race, which is Gumbel's maximum). Else the inverse of the cumulative sum, in float64.
    """
    p = p.detach()
    if count == 1 or not replacement:
        wide = torch.float64 if p.dtype == torch.float64 else torch.float32
        race = p.to(wide) / draw.exponential(p.shape, wide)
        return race.argmax(-1, keepdim=True) if count == 1 else race.topk(count, -1).indices
    total = p.double().cumsum(-1)
    uniform = draw.uniform((*p.shape[:-1], count), torch.float64)
    # a little less than the sum, so that rounding cannot reach a last class of weight 0
    wanted = uniform * (1 - 2.0**-40) * total[..., -1:]
    return torch.searchsorted(total, wanted, right=True)


@drawing("Tensor self, Tensor seed, float std, int call) -> Tensor")
def normal_around(mean: torch.Tensor, draw: Draw, std: float) -> torch.Tensor:
    """aten.normal.Tensor_float."""
    return draw.normal(mean.shape, mean.dtype) * std + mean.detach()


@drawing("Tensor self, Tensor seed, float mean, int call) -> Tensor")
def normal_scaled(std: torch.Tensor, draw: Draw, mean: float) -> torch.Tensor:
    """aten.normal.float_Tensor."""
    return draw.normal(std.shape, std.dtype) * std.detach() + mean


@drawing("Tensor self, Tensor std, Tensor seed, int call) -> Tensor")
def normal_each(mean: torch.Tensor, std: torch.Tensor, draw: Draw) -> torch.Tensor:
    """aten.normal.Tensor_Tensor, of operands of one shape."""
    return draw.normal(mean.shape, mean.dtype) * std.detach() + mean.detach()


@drawing(_FLOATS.format("mean", "std"))
def log_normal(x: torch.Tensor, draw: Draw, mean: float, std: float) -> torch.Tensor:
    """aten.log_normal of x's shape."""
    return (draw.normal(x.shape, x.dtype) * std + mean).exp()


@drawing(_FLOATS.format("median", "sigma"))
def cauchy(x: torch.Tensor, draw: Draw, median: float, sigma: float) -> torch.Tensor:
    """aten.cauchy of x's shape."""
    turn = draw.uniform(x.shape, x.dtype) - 0.5
    return median + sigma * torch.tan(math.pi * turn)


@drawing("Tensor self, Tensor seed, float p, int call) -> Tensor")
def geometric(x: torch.Tensor, draw: Draw, p: float) -> torch.Tensor:
    """aten.geometric of x's shape: the trials up to the first success, 1 or more."""
    if p == 1:
        return torch.ones_like(x)
    waited = draw.exponential(x.shape, torch.float64)
    return (waited / -math.log1p(-p)).ceil().clamp_min(1).to(x.dtype)


@drawing(_FLOATS.format("lower", "upper"))
def rrelu(x: torch.Tensor, draw: Draw, lower: float, upper: float) -> torch.Tensor:
    """aten.rrelu in training: negative elements times a slope each, uniform in [lower, upper)."""
    slope = draw.uniform(x.shape, x.dtype) * (upper - lower) + lower
    return torch.where(x <= 0, x * slope, x)
