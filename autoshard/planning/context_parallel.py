"""The choices that an axis cp leaves: weights stored as shards and used whole, tokens split.

The ranks of cp hold the same batch, and each computes with its part of every sequence. So a weight
is stored by rows, as on `dp_shard`, and gathered for its use; what a weight is applied to is split
along the sequence wherever the operator's rule allows it, never along the batch or the features.
What lies between (attention, losses, shifts of the labels) is planned as on any axis: attention on
all-to-alls of heads or on gathered keys and values, whichever is cheaper.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import fx

from autoshard.planning.mixtures import is_mixture
from autoshard.planning.operators import ATTENTION, packet
from autoshard.planning.strategy import Strategy, operands, value
from autoshard.runtime.collectives import S, State, shard_dim
from autoshard.runtime.operators import attend_to_prefix


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


def contiguous_share(n: int) -> float:
    """The work of the last of n contiguous parts of causal attention, of an n-th of it all."""
    return (2 * n - 1) / n


def contiguously(strategy: Strategy, n: int) -> Strategy:
    """The strategy, charged the work of contiguous parts where it is causal attention by rows."""
    by_rows = strategy.impl is attend_to_prefix
    return strategy._replace(share=contiguous_share(n)) if by_rows else strategy


def _splits_attention(node: fx.Node, strategy: Strategy) -> bool:
    """Whether each rank attends with its heads or with its rows of the queries."""
    rank = value(operands(node)[0]).dim()
    return strategy.output in (S(rank - 3), S(rank - 2))


def _splits_tokens(node: fx.Node, strategy: Strategy) -> bool:
    """Whether each rank makes its part of the sequence of `[batch, sequence, .., features]`, or of
    `[tokens, features]`."""
    made = value(node)
    if not isinstance(made, torch.Tensor) or not isinstance(strategy.output, str):
        return False
    dim = shard_dim(strategy.output)
    return dim is not None and (0 if made.dim() < 3 else 1) <= dim < made.dim() - 1
