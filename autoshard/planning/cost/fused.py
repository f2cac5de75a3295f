"""What a collective gains by being one operator with the matrix products beside it.

Apart, the product waits for the gather, or the reduce-scatter for the product. As one operator the
two run beside each other, in as many pieces as there are ranks:

    seconds = max(communication, products) + START_SECONDS

so that it spares the shorter of the two, less what starting takes. Where an operator has one
product and a gradient is the sum of several (of q, k and v), their factors are copied side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from autoshard.planning.cost.clusters import Cluster
from autoshard.planning.cost.model import node_flops
from autoshard.planning.operators import ADDED_PRODUCTS, PRODUCTS, aten, packet

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
    return (
        node_flops(node) if packet(node) in _FUSED and _matrix(node).meta["val"].dim() == 2 else 0
    )


def _matrix(node: fx.Node) -> fx.Node:
    found = node.args[2 if packet(node) in ADDED_PRODUCTS else 1]
    assert isinstance(found, fx.Node)
    return found
