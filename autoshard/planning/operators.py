"""Sets of operators by what the cost model, the estimates and the passes ask about them.

The entries are packets (every overload of an operator), so that one set serves the serial graph
and the graphs AOTAutograd makes; `packet(node)` is what to look up.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autoshard.runtime import randomness

aten = torch.ops.aten

ADDED_PRODUCTS = frozenset({aten.addmm, aten.baddbmm, aten.addmv})
"""Matrix products whose first operand is a term that is added to the product of the next two."""

CONVOLUTIONS = frozenset(
    {
        *(aten.conv1d, aten.conv2d, aten.conv3d, aten.convolution, aten._convolution),
        *(aten.conv_transpose1d, aten.conv_transpose2d, aten.conv_transpose3d),
    }
)

PRODUCTS = frozenset(
    {
        *(aten.linear, aten.mm, aten.bmm, aten.matmul, aten.mv),
        *(aten._grouped_mm, aten._scaled_mm, aten._scaled_grouped_mm),
        *ADDED_PRODUCTS,
        *CONVOLUTIONS,
    }
)
"""Matrix products and convolutions: a kernel each, whose time is arithmetic."""

ATTENTION = frozenset({aten.scaled_dot_product_attention, randomness.ATTENTION})
"""Attention as one operator: the scores are never in memory."""

LOOKUPS = frozenset({aten.embedding, aten.index, aten.index_select, aten.gather, aten.take})
"""Operators that read of their first operand, the table, only about what they return."""

INDEX_DERIVATIVES = LOOKUPS | {
    *(aten.where, aten.masked_fill, aten.scatter, aten.scatter_add, aten.index_add),
}
"""Operators whose derivative needs only their indices or masks, no value with a gradient."""

LOSSES = frozenset({aten.cross_entropy_loss, aten.nll_loss, aten.nll_loss_nd})
"""Losses of class indices over a table of scores."""

RESHAPES = frozenset({aten.reshape, aten.view})
"""Views that keep the order of the elements in memory."""

UNFUSED = LOOKUPS | LOSSES | {aten.sort, aten.topk, aten.index_put}
"""Operators, besides matrix products, that a compiler does not join to their neighbours."""


def packet(node: fx.Node) -> Any:
    """The operator a node calls, whatever the overload; None for anything else."""
    return getattr(node.target, "overloadpacket", None)


def target_name(node: fx.Node) -> str:
    """What a node calls, by a name that is the same in every process."""
    ordinary = isinstance(node.target, (str, torch._ops.OpOverload))
    return str(node.target) if ordinary else str(getattr(node.target, "__name__", node.target))


def is_causal(node: fx.Node) -> bool:
    """Whether a node is attention that skips the keys after each query's own."""
    if packet(node) not in ATTENTION:
        return False
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    given = {**dict(zip(names, node.args)), **node.kwargs}
    return bool(given.get("is_causal"))


def is_view(node: fx.Node) -> bool:
    """Whether an operator may return another name for its operand's memory, by its schema."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target.is_view
