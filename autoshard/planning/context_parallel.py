"""The choices that an axis cp leaves: weights stored as shards and used whole, tokens split.

The ranks of cp hold the same batch, and each computes with its part of every sequence. So a weight
is stored by rows, as on `dp_shard`, and gathered for its use; what a weight is applied to is split
along the sequence wherever the operator's rule allows it, or where that is asked for along the
batch, never along the features.
What lies between (attention, losses, shifts of the labels) is planned as on any axis: attention on
all-to-alls of heads or on gathered keys and values, whichever is cheaper.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import fx

from autoshard.planning.mixtures import is_mixture
from autoshard.planning.operators import ATTENTION, packet
from autoshard.planning.sizes import is_one
from autoshard.planning.strategy import ImplCollective, Strategy, operands, value
from autoshard.planning.values import tensor_bytes
from autoshard.runtime.collectives import I, R, S, State, shard_dim
from autoshard.runtime.masked_attention import MASKED_ATTENTION, masked_both_ends, masked_prefix
from autoshard.runtime.operators import (
    Bound,
    attend_by_heads,
    attend_to_both_ends,
    attend_to_prefix,
    unbound,
)

aten = torch.ops.aten

BALANCED: dict[Any, Any] = {attend_to_prefix: attend_to_both_ends, masked_prefix: masked_both_ends}
"""Causal attention by rows in contiguous parts, and the same where they are in head-tail order."""


def attention_form(node: fx.Node, strategy: Strategy) -> str:
    """How attention runs over cp; "" for any other operator."""
    if packet(node) not in ATTENTION:
        return ""
    rank, exchanged = value(operands(node)[0]).dim(), strategy.impl is not None
    by_heads = strategy.output == S(rank - 3)
    if by_heads or (exchanged and unbound(strategy.impl)[0] is attend_by_heads):  # type: ignore[arg-type]
        return "by heads"
    return "by rows" if _splits_attention(node, strategy) else "whole on every rank"


class WeightsOnly:
    """Which values of a graph are made of parameters alone, told node by node in its order."""

    def __init__(self, parameters: Collection[fx.Node]) -> None:
        self._found: set[fx.Node] = set(parameters)

    def __contains__(self, node: fx.Node) -> bool:
        return node in self._found

    def note(self, node: fx.Node) -> None:
        """Take in the next node of the graph."""
        sources = node.all_input_nodes
        if node.op == "call_function" and sources and all(n in self._found for n in sources):
            self._found.add(node)


def stored_by_rows(node: fx.Node, states: Sequence[State]) -> list[State]:
    """The states of `states` in which cp stores a parameter: by rows, where it has enough of them;
    a vector as is cheapest."""
    rows = value(node).dim() > 1 and S(0) in states
    return [S(0)] if rows else list(states)


def along_the_sequence(
    node: fx.Node, found: Sequence[Strategy], weights: WeightsOnly
) -> list[Strategy]:
    """The strategies of `found` that use weights whole; where one is a matrix, those that split the
    sequence, if there are any; of attention those that split heads or rows."""
    sources = operands(node)
    if is_mixture(node):  # stacks are stored by experts, and may stay so
        return [one for one in found if shard_dim(one.inputs[0]) is not None] or list(found)
    if packet(node) in ATTENTION:
        return [one for one in found if _splits_attention(node, one)] or list(found)
    used = [i for i, source in enumerate(sources) if source in weights]
    if not used or len(used) == len(sources):
        return list(found)
    whole = [one for one in found if all(shard_dim(one.inputs[i]) is None for i in used)]
    if any(value(sources[i]).dim() > 1 for i in used):
        split = [one for one in whole if _splits_tokens(node, one)]
        return split or whole or list(found)
    return whole or list(found)


def with_heads_as_one(
    node: fx.Node, found: Sequence[Strategy], n: int, beside: int
) -> list[Strategy]:
    """The strategies of attention where an axis of `beside` ranks is planned afterwards: heads are
    exchanged inside of one operator, each of those ranks its own, or not at all.

    Apart, the exchange would need every head on every rank: it splits the dim that they are in.
    """
    if packet(node) not in ATTENTION:
        return list(found)
    rank = value(operands(node)[0]).dim()
    heads, rows = rank - 3, rank - 2
    left = [one for one in found if one.output != S(heads)]
    query, key, _, *masks = (value(one) for one in operands(node))
    parts = n * beside
    sizes = [(t.shape[heads], parts) for t in (query, key)]
    sizes += [(t.shape[rows], n) for t in (query, key)]
    even = all(isinstance(size, int) and size % ranks == 0 for size, ranks in sizes)
    plain = node.target in (aten.scaled_dot_product_attention.default, MASKED_ATTENTION)
    alike = all(m.dim() < rank - heads or is_one(m.shape[m.dim() - 3]) for m in masks)
    if not (even and plain and alike) or len(left) == len(found):
        return left or list(found)
    gradients = [t.dtype.is_floating_point for t in masks]
    states = (*[S(rows)] * 3, *[R if one else I for one in gradients])
    moved = [tensor_bytes(value(one)) // n for one in (*operands(node)[:3], node)]
    traffic = [ImplCollective("all_to_all", size, back) for back in (False, True) for size in moved]
    impl = Bound.of(attend_by_heads, op=node.target)
    return [*left, Strategy(states, S(rows), impl, tuple(traffic))]


def contiguous_share(n: int) -> float:
    """The work of the last of n contiguous parts of causal attention, of an n-th of it all."""
    return (2 * n - 1) / n


def contiguously(node: fx.Node, strategy: Strategy, n: int) -> Strategy:
    """The strategy, charged the work of contiguous parts where it is causal attention by rows."""
    return strategy._replace(share=contiguous_share(n)) if unequal(node, strategy) else strategy


def unequal(node: fx.Node, strategy: Strategy) -> bool:
    """Whether contiguous parts of the rows have unequal work: of a window they are as good as
    alike."""
    window = node.args[5:6] if node.target is MASKED_ATTENTION else ()
    return strategy.impl in BALANCED and window in ((), (None,))


def _splits_attention(node: fx.Node, strategy: Strategy) -> bool:
    """Whether each rank attends with its heads or with its rows of the queries."""
    rank = value(operands(node)[0]).dim()
    dim = None if isinstance(strategy.output, tuple) else shard_dim(strategy.output)
    return dim in (rank - 3, rank - 2)


def _splits_tokens(node: fx.Node, strategy: Strategy) -> bool:
    """Whether each rank makes its part of the sequence of `[batch, sequence, .., features]`, or of
    `[tokens, features]`."""
    made = value(node)
    if not isinstance(made, torch.Tensor) or not isinstance(strategy.output, str):
        return False
    dim = shard_dim(strategy.output)
    return dim is not None and (0 if made.dim() < 3 else 1) <= dim < made.dim() - 1
