"""How many bytes of merged collectives a bucket holds where the caller says nothing.

Megatron-Core's size (`DistributedDataParallelConfig`), but a part of the model: one that is
smaller than eight of those buckets would be whole in one, and nothing would overlap.
"""

from __future__ import annotations

_ELEMENTS, _ELEMENTS_A_RANK, _PARTS, _LEAST = 40_000_000, 1_000_000, 8, 4 << 20


def reference_bytes(itemsize: int, ranks: int) -> int:
    """Megatron-Core's size: 40 million elements, or a million a rank where that is more."""
    return max(_ELEMENTS, _ELEMENTS_A_RANK * ranks) * itemsize


def default_bucket_bytes(total: int, reference: int) -> int:
    """The most a bucket holds: `reference`, but no more than an eighth of `total`, the bytes of all
    that is to be merged, and no less than 4 MiB, below which there is only latency."""
    return min(reference, max(total // _PARTS, _LEAST))
