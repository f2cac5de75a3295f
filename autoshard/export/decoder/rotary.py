"""Rotary embeddings: read off what they do to a head, and computed from a configuration."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from autoshard.export.decoder.probing import close
from autoshard.export.errors import export_error


def rotation(
    rotated: Callable[[Tensor], Tensor], head_dim: int, precision: float = 0.0
) -> tuple[Tensor, int, bool] | None:
    """(angles at position 1, dims that turn, whether pairs are neighbours) of `rotated`.

    rotated: [head_dim] of an unrotated head -> [positions, head_dim]. precision: relative, of its
    tables. None: it is no such rotation.
    """
    tolerance = max(1e-5, 4 * precision)
    ones = torch.ones(head_dim, dtype=torch.float64)
    other = torch.linspace(-1, 1, head_dim, dtype=torch.float64).square() + 0.25
    of_ones, of_other = rotated(ones)[1], rotated(other)[1]
    turns = ((of_ones - ones).abs() > 1e-11) | ((of_other - other).abs() > 1e-11)
    if not bool(turns.any()):
        return None
    dim = int(turns.nonzero().max()) + 1
    if dim % 2:
        return None
    for interleaved in (False, True):
        pairs = torch.arange(dim)
        first, second = pairs.view(-1, 2).unbind(1) if interleaved else pairs.view(2, -1)
        cos = (of_ones[first] + of_ones[second]) / 2
        sin = (of_ones[second] - of_ones[first]) / 2
        expected = other.clone()
        expected[first] = other[first] * cos - other[second] * sin
        expected[second] = other[second] * cos + other[first] * sin
        one = close(cos**2 + sin**2, torch.ones_like(cos), tolerance)
        if one and close(of_other, expected, tolerance):
            return torch.atan2(sin, cos), dim, interleaved
    return None


def frequencies(base: float, dim: int, scaling: Mapping[str, Any] | None) -> Tensor:
    """The `dim // 2` angles a rotary embedding turns by at position 1.

    scaling: None, or of the rope_type linear, llama3, yarn or longrope, with the fields of Hugging
    Face configurations; of longrope the factors for short sequences. Raises ExportError for
    another type.
    """
    freq = base ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    if scaling is None or (kind := rope_type(scaling)) == "default":
        return freq
    if kind == "linear":
        return freq / scaling["factor"]
    if kind == "llama3":
        return _llama3(freq, scaling)
    if kind == "yarn":
        return _yarn(freq, base, dim, scaling)
    if kind == "longrope":
        return freq / torch.tensor(scaling["short_factor"], dtype=torch.float64)
    raise export_error(f"rotary embeddings of type {kind!r} are not known to the exporter")


def rope_type(scaling: Mapping[str, Any] | None) -> str:
    """The type of a scaling, under its new or its old name."""
    found = scaling or {}
    return str(found.get("rope_type", found.get("type", "default")))


def magnitude(scaling: Mapping[str, Any] | None, longest: int | None = None) -> float:
    """What a scaling multiplies a turned query, and a turned key, by.

    YaRN's and LongRoPE's, as TensorRT-LLM has them. longest: the most positions.
    """
    kind = rope_type(scaling)
    if scaling is None or kind not in ("yarn", "longrope"):
        return 1.0
    if kind == "longrope":
        original = scaling["original_max_position_embeddings"]
        factor = (longest or original) / original
        return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))

    def scale(weight: float) -> float:
        factor = float(scaling["factor"])
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    return scale(scaling.get("mscale", 1.0)) / scale(scaling.get("mscale_all_dim", 0.0))


def fitted_base(freq: Tensor, dim: int) -> float:
    """The base of which plain rotary frequencies are the powers, to six digits."""
    last = freq[-1].item()
    exponent = -(dim - 2) / dim
    return float(f"{last ** (1 / exponent):.6g}") if exponent else 10000.0


def _llama3(freq: Tensor, scaling: Mapping[str, Any]) -> Tensor:
    """Llama 3.1's interpolation: long waves slowed by `factor`, short ones kept."""
    original = scaling["original_max_position_embeddings"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = original * freq / (2 * math.pi)
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    result: Tensor = (1 - smooth) * freq / scaling["factor"] + smooth * freq
    return result


def _yarn(freq: Tensor, base: float, dim: int, scaling: Mapping[str, Any]) -> Tensor:
    """YaRN: pairs that turn often are kept, those that turn seldom slowed by `factor`."""
    original = scaling["original_max_position_embeddings"]

    def pair_that_turns(times: float) -> float:
        return dim * math.log(original / (times * 2 * math.pi)) / (2 * math.log(base))

    first = max(math.floor(pair_that_turns(scaling.get("beta_fast") or 32)), 0)
    last = min(math.ceil(pair_that_turns(scaling.get("beta_slow") or 1)), dim - 1)
    width = last - first or 0.001
    slowed = ((torch.arange(dim // 2, dtype=torch.float64) - first) / width).clamp(0, 1)
    result: Tensor = freq / scaling["factor"] * slowed + freq * (1 - slowed)
    return result
