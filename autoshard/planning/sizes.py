"""Sizes of dims: when one may be split over n ranks, and why not otherwise."""

import math
from collections.abc import Iterable

import torch

from autoshard.runtime import compat
from autoshard.runtime.collectives import chunk_size

Size = int | torch.SymInt


def hint(size: Size) -> int | None:
    """The size as seen while tracing; None where it is only known at run time."""
    if isinstance(size, torch.SymInt):
        return compat.size_hint(size)
    return int(size)


def why_not(size: Size, n: int, *, even: bool = False) -> str | None:
    """Why a dim of `size` rows cannot be split over `n` ranks; None where it can.

    even: whether every rank must hold the same number of rows. A symbolic size always must (its
    remainder is guarded); other sizes follow torch.chunk's rule, and no rank may be empty,
    because a maximum over no rows is an error.
    """
    rows = hint(size)
    if rows is None:
        return "its size is only known at run time"
    if rows < n:
        return f"{rows} < {n}"
    if rows % n == 0:
        return None
    if even or isinstance(size, torch.SymInt):
        return f"{rows} % {n} != 0"
    chunk = chunk_size(rows, n)
    if (n - 1) * chunk >= rows:
        return f"{rows} rows in chunks of {chunk} leave a rank of {n} empty"
    return None


def same(a: Size, b: Size) -> bool:
    """Whether two sizes are equal for every value of their symbols."""
    if isinstance(a, torch.SymInt) or isinstance(b, torch.SymInt):
        return str(a) == str(b)
    return a == b


def is_one(size: Size) -> bool:
    """Whether a size is 1 for every value of its symbols."""
    return isinstance(size, int) and size == 1


def same_shape(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have the same shape for every value of its symbols; adds no guard."""
    return a.dim() == b.dim() and all(map(same, a.shape, b.shape))


def seen_keys(rows: int, window: int) -> int:
    """How many pairs there are of a query and a key up to it among `rows` places, of which a query
    sees `window` at most."""
    near = min(rows, window)
    return near * (near + 1) // 2 + (rows - near) * window


def count(sizes: Iterable[Size]) -> int:
    """Elements of a tensor of these sizes, a symbol counted with its hint, at least 1 each."""
    return math.prod(hint(size) or 1 for size in sizes)
