"""Buckets of merged collectives: the rule that fills them, and their default size in bytes.

The default is Megatron-Core's size (`DistributedDataParallelConfig`), but a part of the model: one
that is smaller than eight of those buckets would be whole in one, and nothing would overlap.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

_ELEMENTS, _ELEMENTS_A_RANK, _PARTS, _LEAST = 40_000_000, 1_000_000, 8, 4 << 20


def reference_bytes(itemsize: int, ranks: int) -> int:
    """Megatron-Core's size: 40 million elements, or a million a rank where that is more."""
    return max(_ELEMENTS, _ELEMENTS_A_RANK * ranks) * itemsize


def default_bucket_bytes(total: int, reference: int) -> int:
    """The most a bucket holds: `reference`, but no more than an eighth of `total`, the bytes of all
    that is to be merged, and no less than 4 MiB, below which there is only latency."""
    return min(reference, max(total // _PARTS, _LEAST))


def fill_buckets(
    sizes: Sequence[int], keys: Sequence[Hashable], limit: int, before: bool = False
) -> list[list[int]]:
    """Positions of the members of each bucket, which have one key; buckets by their first member.

    sizes: bytes of each member, in the order in which they are filled in. A bucket closes when it
    holds `limit` bytes; with `before`, before it would hold more. A member that fills a bucket by
    itself is alone in one, and closes none.
    """
    filling: dict[Hashable, list[int]] = {}
    buckets: list[list[int]] = []
    for i, (nbytes, key) in enumerate(zip(sizes, keys, strict=True)):
        if nbytes >= limit:
            buckets.append([i])
            continue
        bucket = filling.get(key)
        if bucket is not None and before and sum(sizes[j] for j in bucket) + nbytes > limit:
            bucket = None
        if bucket is None:
            bucket = filling[key] = []
            buckets.append(bucket)
        bucket.append(i)
        if sum(sizes[j] for j in bucket) >= limit:
            del filling[key]
    return buckets


def aligned(sizes: Sequence[int], ranks: int) -> tuple[list[int], int]:
    """Where members begin in a rank's part of a bucket of gradients, and how long the part is.

    sizes: elements of each member a rank; ranks: parts of the bucket (1: an all-reduce). Members
    begin at multiples of 64 elements, and a scattered bucket is a multiple of lcm(ranks, 128), as
    in Megatron-Core's distributed optimizer (`param_layout`): gradients are views of the bucket,
    and vector kernels, of Inductor and of fused optimizers, copy or slow down on what is not
    aligned. An all-reduce has no parts to align, and its bucket ends with its last member.

    Buckets of parameters have no padding: each weight is copied out of its bucket, whose layout is
    by ranks, and the copy is aligned by itself.
    """
    starts, end = [], 0
    for size in sizes:
        starts.append(end)
        end += -(-size // _ALIGNED) * _ALIGNED
    if ranks == 1:
        return starts, starts[-1] + sizes[-1] if sizes else 0
    multiple = math.lcm(ranks, 128) // ranks
    return starts, -(-end // multiple) * multiple


_ALIGNED = 64
