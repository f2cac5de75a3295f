"""Operators that draw random numbers as a function of a seed, a call number and the element.

    autoshard::random_seed        one 64-bit seed from torch's default CPU generator
    autoshard::tracked_seeds      two, from named states: one alike on all ranks, one apart
    autoshard::dropout, ...       deterministic, given the seed

The others are composite: AOTAutograd traces through them to integer and pointwise
operators, which compilers fuse into their neighbours. Each is a function here that also takes the
`part` of the whole tensor that a rank holds; `on_shard` calls it with the rank's own. Count up
`VERSION` whenever one gives other numbers.

The seed comes from the CPU generator whatever the device, so that `torch.manual_seed` gives the
same numbers everywhere and `torch.get_rng_state` saves them.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch

from autoshard.runtime import collectives, compat
from autoshard.runtime.collectives import Axis, chunk_bounds
from autoshard.runtime.randomness import generators
from autoshard.runtime.randomness.philox import DRAWING, Draw, Part, drawing

_int64 = torch.iinfo(torch.int64)
_stream = 0
_stands_for = 0


def draw_apart(stream: int) -> None:
    """Let this process draw from stream number `stream` (0 at first) of every seed.

    For ranks that hold different batches: their index along the data-parallel axes. A compiled
    model sets it at each call.
    """
    global _stream
    _stream = stream


def draw_for(rank: int) -> None:
    """Let this process, alone in its mesh, draw as data-parallel rank `rank` of a larger one."""
    global _stands_for
    _stands_for = rank


def _random_seed(device: torch.device) -> torch.Tensor:
    drawn = torch.randint(_int64.min, _int64.max, (), device="cpu")
    return _apart(drawn, _stream + _stands_for).to(device, non_blocking=True)


def _apart(seed: torch.Tensor, stream: int) -> torch.Tensor:
    """The seed of a stream; stream 0 has `seed` itself."""
    offset = stream * generators.STREAM % 2**64
    return seed ^ (offset - 2**64 if offset > _int64.max else offset) if stream else seed


def shared_seed(
    device: torch.device, *, axis: Axis, outer: Axis | None = None, others: Sequence[Axis] = ()
) -> torch.Tensor:
    """`random_seed` of the first rank of the axis, and of that of the others, on all of them.

    Every rank draws, so that generators that started alike stay so; those that do not agree, or
    were used apart, do no harm.
    """
    axes = [one for one in (axis, outer, *others) if one is not None]
    if axis.group.startswith(collectives.PREFIX) and any(one.rank for one in axes):
        # threads share one generator: the first draws alone, as one process would
        seed = torch.zeros((), dtype=torch.int64, device=device)
    else:
        seed = torch.ops.autoshard.random_seed(device)
    for one in axes:
        if one.size > 1:
            seed = collectives.broadcast(seed.reshape(1), 0, one).reshape(())
    return seed


def _tracked_seeds(device: torch.device, alike: str, apart: str) -> torch.Tensor:
    drawn = [generators.TRACKER.draw(name) for name in (alike, apart)]
    return torch.stack(drawn).to(device, non_blocking=True)


def tracked_seeds(
    device: torch.device, alike: str, apart: str, *, axis: Axis, outer: Axis | None = None
) -> torch.Tensor:
    """int64 [2]: a seed from the state `alike`, which is that of all ranks of the axis, and one
    from `apart`, the rank's own. Every rank draws both, whichever its values ask for. The ranks of
    an outer axis draw the same two."""
    if not axis.group.startswith(collectives.PREFIX):
        return torch.ops.autoshard.tracked_seeds(device, alike, apart)
    tracker = generators.tracker_of(axis, outer)
    return torch.stack([tracker.draw(name) for name in (alike, apart)]).to(device)


_ELEMENTS = "Tensor self, Tensor seed, float p, int call) -> "
_TWO = "Tensor self, Tensor seed, float {}, float {}, int call, ScalarType? dtype=None) -> Tensor"


@drawing(f"{_ELEMENTS}Tensor")
def dropout(x: torch.Tensor, draw: Draw, p: float) -> torch.Tensor:
    """aten.dropout in training."""
    return _dropped(x, draw, p)[0]


@drawing(f"{_ELEMENTS}(Tensor, Tensor)")
def native_dropout(x: torch.Tensor, draw: Draw, p: float) -> tuple[torch.Tensor, torch.Tensor]:
    """aten.native_dropout in training: the result, and the mask of what is kept (bool)."""
    return _dropped(x, draw, p)


@drawing(f"{_ELEMENTS}Tensor")
def feature_dropout(x: torch.Tensor, draw: Draw, p: float) -> torch.Tensor:
    """aten.feature_dropout in training: drops whole channels of x [N, C, ...]."""
    mask = draw.keep(x.shape[:2], p)
    return x * mask.reshape([*x.shape[:2], *[1] * (x.dim() - 2)]) * _scale(p)


def _dropped(x: torch.Tensor, draw: Draw, p: float) -> tuple[torch.Tensor, torch.Tensor]:
    mask = draw.keep(x.shape, p)
    return x * mask * _scale(p), mask


def _scale(p: float) -> float:
    return 0.0 if p == 1 else 1 / (1 - p)


@drawing("Tensor self, Tensor seed, int call) -> Tensor")
def bernoulli(p: torch.Tensor, draw: Draw) -> torch.Tensor:
    """aten.bernoulli: 1 with the probability that each element of `p` says."""
    wide = torch.float64 if p.dtype == torch.float64 else torch.float32
    return (draw.uniform(p.shape, wide) < p.detach()).to(p.dtype)


@drawing(f"{_ELEMENTS}Tensor")
def bernoulli_p(x: torch.Tensor, draw: Draw, p: float) -> torch.Tensor:
    """aten.bernoulli.p: 1 with probability `p`, of x's shape and dtype."""
    return draw.keep(x.shape, 1 - p).to(x.dtype)


@drawing(_TWO.format("low", "high"))
def uniform(
    x: torch.Tensor, draw: Draw, low: float, high: float, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """aten.uniform of x's shape; in [low, high)."""
    numbers = draw.uniform(x.shape, dtype or x.dtype)
    return numbers if (low, high) == (0, 1) else numbers * (high - low) + low


@drawing(_TWO.format("mean", "std"))
def normal(
    x: torch.Tensor, draw: Draw, mean: float, std: float, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """aten.normal_functional: normal numbers of x's shape."""
    numbers = draw.normal(x.shape, dtype or x.dtype)
    return numbers if (mean, std) == (0, 1) else numbers * std + mean


@drawing("Tensor self, Tensor seed, float rate, int call) -> Tensor")
def exponential(x: torch.Tensor, draw: Draw, rate: float) -> torch.Tensor:
    """aten.exponential of x's shape."""
    return draw.exponential(x.shape, x.dtype) / rate


@drawing(
    "Tensor query, Tensor key, Tensor value, Tensor? attn_mask, Tensor seed, float p, "
    "bool is_causal, float? scale, bool enable_gqa, int call) -> Tensor"
)
def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    draw: Draw,
    p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    """aten.scaled_dot_product_attention with dropout, in the form that writes the scores out.

    The mask is that of the probabilities [..., query rows, key rows]; no fused kernel takes one.
    As in ATen's math kernel, 16-bit operands are computed in float32, and a row that sees no key
    gives zeros.
    """
    wide = torch.float32 if query.element_size() < 4 else query.dtype
    if enable_gqa:
        shared = query.shape[-3] // key.shape[-3], query.shape[-3] // value.shape[-3]
        key, value = key.repeat_interleave(shared[0], -3), value.repeat_interleave(shared[1], -3)
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    scores = (query.to(wide) * factor) @ key.to(wide).transpose(-2, -1)
    if is_causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~seen, -math.inf)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -math.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask.to(wide)
    probabilities = torch.ops.aten._safe_softmax.default(scores, -1)
    dropped, _ = _dropped(probabilities, draw, p)
    return (dropped @ value.to(wide)).to(query.dtype)


def on_shard(
    first: torch.Tensor,
    *args: Any,
    op: str,
    dim: int,
    extent: int | None,
    axis: Axis,
    inner_dim: int | None = None,
    outer: Axis | None = None,
) -> Any:
    """Run the function of `DRAWING` that is named `op` on a shard.

    dim: the sharded dim of the first operand, which is that of the random numbers. extent: its
    global size; None where that is symbolic, and then the axis divides it. inner_dim, outer: where
    the shard of an outer axis is split again on `axis`, along that dim, in equal parts; not split
    again with None, which tracked seeds alone ask for.
    """
    if outer is None:
        return DRAWING[op].run(first, *args, part=_place(first.shape[dim], dim, extent, axis))
    at = DRAWING[op].seed - 1
    if args[at].dim():  # of `tracked_seeds`: shards of an outer axis are as batches of their own
        args = (*args[:at], _apart(args[at], outer.rank), *args[at + 1 :])
        part = None if inner_dim is None else Part(inner_dim, 0, first.shape[inner_dim])
        return DRAWING[op].run(first, *args, part=part)
    assert inner_dim is not None
    length = first.shape[dim] * (axis.size if inner_dim == dim else 1)
    within = _place(length, dim, extent, outer)
    part = _place(first.shape[inner_dim], inner_dim, None, axis)._replace(within=within)
    return DRAWING[op].run(first, *args, part=part)


def _place(length: int, dim: int, extent: int | None, axis: Axis) -> Part:
    if extent is None:
        return Part(dim, axis.rank * length, axis.size * length)
    return Part(dim, chunk_bounds(extent, axis)[0], extent)


def on_microbatch(
    first: torch.Tensor, *args: Any, op: str, dim: int, extent: int, axis: Axis
) -> Any:
    """As `on_shard`, of rows that the last argument says: a tensor of one element, the first."""
    *given, start = args
    return DRAWING[op].run(first, *given, part=Part(dim, start.reshape(()), extent))


# a CUDA graph would draw once, and copy from memory that is gone: it has the seed from outside
_SEEDED = (torch.Tag.nondeterministic_seeded, torch.Tag.cudagraph_unsafe)
compat.define_operator(
    "random_seed(Device device) -> Tensor",
    _random_seed,
    lambda device: torch.empty((), dtype=torch.int64, device=device),
    _SEEDED,
)
compat.define_operator(
    "tracked_seeds(Device device, str alike, str apart) -> Tensor",
    _tracked_seeds,
    lambda device, alike, apart: torch.empty((2,), dtype=torch.int64, device=device),
    _SEEDED,
)
ATTENTION = torch.ops.autoshard.attention
