"""Collectives that are merged: with each other in buckets, and with the products beside them.

Buckets of merged collectives: the rule that fills them, and their default size in bytes.

The default is Megatron-Core's size (`DistributedDataParallelConfig`), but a part of the model: one
that is smaller than eight of those buckets would be whole in one, and nothing would overlap.

What a collective gains by being one operator with the matrix products beside it.

Apart, the product waits for the gather, or the reduce-scatter for the product. As one operator the
two run beside each other, in as many pieces as there are ranks:

    seconds = max(communication, products) + START_SECONDS

so that it spares the shorter of the two, less what starting takes. Where an operator has one
product and a gradient is the sum of several (of q, k and v), their factors are copied side by side.
"""

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import fx

from autoshard.planning.cost.clusters import Cluster
from autoshard.planning.cost.model import node_flops
from autoshard.planning.operators import ADDED_PRODUCTS, PRODUCTS, aten, packet

_ELEMENTS, _ELEMENTS_A_RANK, _PARTS, _LEAST = 40_000_000, 1_000_000, 8, 4 << 20


def default_bucket_bytes(total: int, members: Iterable[tuple[int, int]]) -> int:
    """The most a bucket holds: Megatron-Core's size, 40 million elements, or a million a rank where
    that is more, but no more than an eighth of `total`, the bytes of all that is to be merged, and
    no less than 4 MiB, below which there is only latency. members: bytes of an element of each, and
    among how many ranks it is split; none: 0."""
    sizes = (max(_ELEMENTS, _ELEMENTS_A_RANK * ranks) * itemsize for itemsize, ranks in members)
    return min(max(sizes, default=0), max(total // _PARTS, _LEAST))


def fill_buckets(
    sizes: Sequence[int], keys: Sequence[Hashable], limit: int, before: bool = False
) -> list[list[int]]:
    """Positions of the members of each bucket, which have one key; buckets by their first member.

    sizes: bytes of each member, in the order in which they are filled in. A bucket closes when it
    holds `limit` bytes; with `before`, before it would hold more. A member that fills a bucket by
    itself is alone in one, and closes none.
    """
    filling: dict[Hashable, tuple[list[int], int]] = {}
    buckets: list[list[int]] = []
    for i, (nbytes, key) in enumerate(zip(sizes, keys, strict=True)):
        if nbytes >= limit:
            buckets.append([i])
            continue
        bucket, held = filling.pop(key, ([], 0))
        if before and held + nbytes > limit:
            bucket, held = [], 0
        if not bucket:
            buckets.append(bucket)
        bucket.append(i)
        if held + nbytes < limit:
            filling[key] = bucket, held + nbytes
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
    *starts, end = accumulate((-(-size // _ALIGNED) * _ALIGNED for size in sizes), initial=0)
    if ranks == 1:
        return starts, starts[-1] + sizes[-1] if sizes else 0
    multiple = math.lcm(ranks, 128) // ranks
    return starts, -(-end // multiple) * multiple


_ALIGNED = 64


START_SECONDS = 2e-5
"""Barriers between the ranks, kernels for each piece, and products of pieces, which are slower than
one of the whole. No figure of a data sheet: torch's operators overtake NCCL and a product on eight
H100s between 256 and 512 rows of an ordinary hidden size, where a gather takes about as long."""

_FUSED = {aten.linear, aten.mm, aten.matmul, *ADDED_PRODUCTS & {aten.addmm}} & PRODUCTS


@dataclass(frozen=True)
class Fusing:
    """Which collectives are one operator with their products: those that gain by it, or `always`
    all that can be. In the first case each is timed at its first call, too."""

    always: bool = False

    def gain(self, communication: float, products: float, copies: float = 0.0) -> float:
        """Seconds that are spared, of a collective, the products beside it and the copies that it
        takes; 0 where the two stay apart. Negative only where it is `always`."""
        gain = min(communication, products) - START_SECONDS - copies
        return gain if self.always else max(0.0, gain)


def fusing_for(option: bool | str, on_gpu: bool, ranks: int, cluster: Cluster) -> Fusing | None:
    """What the option `fuse_collectives` means for an axis of so many neighbouring ranks; None:
    nothing is fused."""
    if option == "auto":
        inside = ranks <= cluster.per_node
        return Fusing() if on_gpu and inside else None
    return Fusing(always=True) if option else None


def fused_dims(shape: Sequence[int | torch.SymInt], n: int) -> tuple[int, ...]:
    """The dims of a value along which a product may be one operator with a collective of `n` ranks:
    what they divide, but for the last dim, over which a product sums."""
    rows = enumerate(shape[:-1])
    return tuple(i for i, size in rows if isinstance(size, int) and size % n == 0)


def multiplies(node: fx.Node, operand: fx.Node) -> bool:
    """Whether a node is a product of the rows of `operand` with a matrix."""
    if packet(node) not in _FUSED:
        return False
    left, right = node.args[1:3] if packet(node) in ADDED_PRODUCTS else node.args[:2]
    if left is not operand or not isinstance(right, fx.Node) or right is operand:
        return False
    return bool(right.meta["val"].dim() == 2)


def product_flops(node: fx.Node) -> int:
    """Operations of a product that a collective may be one operator with; 0 of anything else."""
    if packet(node) not in _FUSED:
        return 0
    matrix: Any = node.args[2 if packet(node) in ADDED_PRODUCTS else 1]
    return node_flops(node) if matrix.meta["val"].dim() == 2 else 0
