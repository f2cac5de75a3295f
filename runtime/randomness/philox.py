"""Random numbers by an element's place in the whole tensor, whichever rank draws it.

Philox4x32-10 (J. Salmon, M. Moraes, R. Dror, D. Shaw, "Parallel random numbers: as easy as
1, 2, 3", SC 2011) in integer tensor operators: the key is the seed of one forward call, the
counter is (element index, call). A rank that holds a shard counts from the shard's place, so that
any split of any dim draws bit for bit what one device draws; eager and compiled code agree because
integers do.

An element takes one block of the generator and uses one or two of its four words. Sharing a block
among four elements would need neighbours on the same rank, and saves nothing in a fused kernel,
where each element computes its own block anyhow.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from autoshard.runtime import compat

ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF
_BLOCK = 1 << 14  # elements; eight buffers of them are 1 MiB

# Random bits in a uniform number: as many as make every multiple of 2**-bits exact and below 1.
_DIGITS = {torch.float32: 24, torch.float64: 53, torch.float16: 11, torch.bfloat16: 8}


class Part(NamedTuple):
    """The place of a shard in the whole tensor: rows `start`... of a `dim` of `extent` rows.

    within: where the tensor that is split is a part itself, on another axis: its place.
    start: a tensor where it differs between calls of one graph, as of micro-batches.
    """

    dim: int
    start: int | torch.Tensor
    extent: int
    within: Part | None = None  # noqa: F821  (itself)


def element_index(shape: Sequence[int], part: Part | None, device: torch.device) -> torch.Tensor:
    """int64 of `shape`: the position of each element in the whole tensor, in row-major order.

    shape: of what this rank holds. part: None where that is the whole tensor.
    """
    index, sizes = torch.arange(math.prod(shape), device=device), list(shape)
    while part is not None:
        index = _index_in_whole(index, sizes, part)
        sizes[part.dim], part = part.extent, part.within
    return index.reshape(shape)


def _index_in_whole(index: torch.Tensor, shape: Sequence[int], part: Part) -> torch.Tensor:
    """The positions in the tensor of which `part`, of `shape`, is one."""
    inner = math.prod(shape[part.dim + 1 :])
    if part.dim == 0:
        return index + part.start * inner
    block = shape[part.dim] * inner
    skipped = part.extent * inner - block  # the others' elements between two of this rank's blocks
    return index + _divided(index, block, math.prod(shape)) * skipped + part.start * inner


def _divided(x: torch.Tensor, divisor: int, total: int) -> torch.Tensor:
    """x // divisor for 0 <= x < total, without a division, which no CPU does in vectors.

    By a product and a shift (T. Granlund, P. Montgomery, "Division by invariant integers using
    multiplication", PLDI 1994), exact below 2**31, where the product stays below 2**63. One loop
    over all elements, other than outer and inner indices would make, is fused with what follows.
    """
    if not (isinstance(divisor, int) and isinstance(total, int)) or total > 1 << 31:
        return x.div(divisor, rounding_mode="floor")
    if divisor <= 1:
        return x
    shift = 31 + (divisor - 1).bit_length()
    # the mask keeps Inductor from folding the product into its index arithmetic, as in `words`
    return ((x & _WORD) * (-(-(1 << shift) // divisor))) >> shift


def words(
    seed: torch.Tensor, index: torch.Tensor, call: int | torch.Tensor, *, large: bool
) -> list[Any]:
    """Four int64 tensors of `index`'s shape, each a random 32-bit word: one block of Philox.

    seed: int64 scalar, the 64 bits of the key. call: distinguishes the draws under one seed; a
    tensor is an int64 scalar.
    large: whether an index may be 2**32 or more.
    """
    # The mask also keeps Inductor from folding the first product into its index arithmetic, which
    # chooses 32 bits by the upper bound of an expression alone.
    a: Any = index & _WORD
    b: Any = index >> 32 if large else 0
    c: Any = call
    d: Any = 0
    key = seed & _WORD, seed >> 32
    for i in range(ROUNDS):
        # Only what is multiplied next must be 32 bits; above those, the others may hold anything.
        # A multiplier m is taken as m - 2**32, below 0, so that no product leaves int64 (overflow
        # is undefined in the C++ that Inductor writes): m * x is then 2**32 * x larger.
        first, second = (_MULTIPLIERS[0] - 2**32) * a, (_MULTIPLIERS[1] - 2**32) * c
        a, b, c, d = (
            (((second >> 32) + c) ^ b ^ (key[0] + i * _WEYL[0])) & _WORD,
            second,
            (((first >> 32) + a) ^ d ^ (key[1] + i * _WEYL[1])) & _WORD,
            first,
        )
    return [a, b & _WORD, c, d & _WORD]


class Draw(NamedTuple):
    """The numbers of one random operator. seed: int64 scalar; or [2], one that is the same on all
    ranks and the rank's own: a part then draws from its own, counted from 0. call: as of `words`.
    part: what this rank holds of the whole; shapes are those of that.
    """

    seed: torch.Tensor
    call: int | torch.Tensor
    part: Part | None = None

    def words(self, shape: Sequence[int], count: int = 4) -> list[Any]:
        """`count` random words of every element of a tensor of `shape`."""
        seed, call, part = self
        if seed.dim():
            seed, part = (seed[0], None) if part is None else (seed[1], None)
        if part is not None and part.within is not None:  # on two axes: composed, in eager code too
            return _numbered(shape, part, seed, call, count)
        place: Any = (-1, 0, 0) if part is None else part[:3]
        starts = isinstance(place[1], torch.Tensor)
        drawn = torch.ops.autoshard.philox_from if starts else torch.ops.autoshard.philox
        number = call if isinstance(call, torch.Tensor) else seed.new_full((), call)
        found: list[Any] = drawn.v1(seed, shape, *place, number, count)
        return found

    def keep(self, shape: Sequence[int], p: float) -> torch.Tensor:
        """bool of `shape`, True with probability 1 - p; exact at p = 0 and p = 1."""
        word: torch.Tensor = self.words(shape, 1)[0]
        return word < round((1 - p) * 2**32)

    def uniform(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Uniform numbers in [0, 1), the same in every element on every device."""
        return _fraction(self.words(shape, 2 if dtype == torch.float64 else 1), dtype)

    def normal(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Standard normal numbers, by the method of Box and Muller, computed in float32 or float64.

        The same up to the rounding of log and cos, which differs between devices.
        """
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        found = self.words(shape)
        radius = (-2 * torch.log1p(-_fraction(found[:2], wide))).sqrt()
        return (radius * torch.cos(2 * math.pi * _fraction(found[2:], wide))).to(dtype)

    def exponential(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Exponential numbers of rate 1, above 0, so that their logarithm is finite."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        numbers = -torch.log1p(-self.uniform(shape, wide))
        return numbers.clamp_min(2.0 ** -(_DIGITS[wide] + 1)).to(dtype)


# The overload of every operator. torch caches compiled graphs on disk under the names of operators:
# count up whenever a function of one gives other numbers, or an old cache would go on giving them.
VERSION = "v1"


class Drawing(NamedTuple):
    """The function of an operator that draws, and the places of its seed and of its call."""

    run: Callable[..., Any]
    seed: int
    call: int


DRAWING: dict[str, Drawing] = {}
"""By the operator's name."""


def drawing(schema: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Defines the operator of that schema by a function whose argument in the place of the seed is
    a `Draw`, and which has no call. What is made of it takes the `part` that a rank holds, too."""
    names = [text.split()[-1].partition("=")[0] for text in schema.partition(")")[0].split(",")]
    at, last = names.index("seed"), names.index("call")

    def made(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*args: Any, part: Part | None = None) -> Any:
            draw = Draw(args[at], args[last], part)
            return function(*args[:at], draw, *args[at + 1 : last], *args[last + 1 :])

        DRAWING[function.__name__] = Drawing(run, at, last)
        compat.define_operator(f"{function.__name__}.{VERSION}({schema}", run)
        return run

    return made


def composed(
    seed: torch.Tensor,
    shape: Sequence[int],
    dim: int,
    start: int | torch.Tensor,
    extent: int,
    call: torch.Tensor,
    count: int,
) -> list[Any]:
    """The operator autoshard::philox in integer operators, for compilers that fuse them."""
    part = Part(dim, start, extent) if dim >= 0 else None
    return _numbered(shape, part, seed, call, count)


def _numbered(
    shape: Sequence[int],
    part: Part | None,
    seed: torch.Tensor,
    call: int | torch.Tensor,
    count: int,
) -> list[Any]:
    index = element_index(shape, part, seed.device)
    whole = list(shape)
    while part is not None:
        whole[part.dim], part = part.extent, part.within
    sizes = [size for size in whole if isinstance(size, int)]
    # a symbolic size is taken for less than 2**20: asking for its value would guard on it
    large = math.prod(sizes) << 20 * (len(whole) - len(sizes)) >= 1 << 32
    return words(seed, index, call, large=large)[:count]


def _kernel(
    seed: torch.Tensor,
    shape: Sequence[int],
    dim: int,
    start: int | torch.Tensor,
    extent: int,
    call: torch.Tensor,
    count: int,
) -> list[torch.Tensor]:
    """The same numbers, operator by operator: in place, on a CPU in blocks that fit its cache."""
    total = math.prod(shape)
    found = [torch.empty(total, dtype=torch.int64, device=seed.device) for _ in range(count)]
    step = _BLOCK if seed.device.type == "cpu" else max(total, 1)
    low, high = seed & _WORD, seed >> 32
    for begin in range(0, total, step):
        end = min(total, begin + step)
        index = torch.arange(begin, end, device=seed.device)
        if dim >= 0:
            inner = math.prod(shape[dim + 1 :])
            if dim:
                block = shape[dim] * inner
                index += index.div(block, rounding_mode="floor").mul_(extent * inner - block)
            index += start * inner
        for word, out in zip(_rounds(index, call, low, high), found):
            torch.bitwise_and(word, _WORD, out=out[begin:end])
    return [word.reshape(shape) for word in found]


def _rounds(
    index: torch.Tensor, call: torch.Tensor, low: torch.Tensor, high: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """`words` without a temporary: six buffers of index's shape take turns."""
    b = index >> 32
    a = index.bitwise_and_(_WORD)
    c, d = call.expand_as(a).clone(), torch.zeros_like(a)
    free = [torch.empty_like(a) for _ in range(2)]
    for i in range(ROUNDS):
        first = torch.mul(a, _MULTIPLIERS[0] - 2**32, out=free[0])
        second = torch.mul(c, _MULTIPLIERS[1] - 2**32, out=free[1])
        c.add_(second >> 32).bitwise_xor_(b).bitwise_xor_(low + i * _WEYL[0]).bitwise_and_(_WORD)
        a.add_(first >> 32).bitwise_xor_(d).bitwise_xor_(high + i * _WEYL[1]).bitwise_and_(_WORD)
        free = [b, d]
        a, b, c, d = c, second, a, first
    return a, b, c, d


def _fraction(found: Sequence[Any], dtype: torch.dtype) -> torch.Tensor:
    digits = _DIGITS[dtype]
    if digits <= 32:
        bits = found[0] >> (32 - digits)
    else:
        bits = ((found[0] >> 5) << 26) | (found[1] >> 6)
    fraction: torch.Tensor = bits.to(dtype) * 2.0**-digits
    return fraction


for _name, _start in (("philox", "SymInt"), ("philox_from", "Tensor")):
    _operator = compat.define_operator(
        f"{_name}.v1(Tensor seed, SymInt[] shape, int dim, {_start} start, SymInt extent, "
        "Tensor call, int count) -> Tensor[]",
        _kernel,
        lambda seed, shape, *more: [seed.new_empty(shape) for _ in range(more[-1])],
    )
    compat.DECOMPOSITIONS[_operator] = composed
