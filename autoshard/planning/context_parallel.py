"""The choices that an axis cp leaves: weights stored as shards and used whole, tokens split.

The ranks of cp hold the same batch, and each computes with its part of every sequence. So a weight
is stored by rows, as on `dp_shard`, and gathered for its use; what a weight is applied to is split
along the sequence wherever the operator's rule allows it, or where that is asked for along the
batch, never along the features.
What lies between (attention, losses, shifts of the labels) is planned as on any axis: attention on
all-to-alls of heads or on gathered keys and values, whichever is cheaper.

Which shards of a planned graph are in head-tail order, so that causal attention is balanced.

Attention by rows (`attend_to_prefix`) leaves the ranks of cp unequal work. In head-tail order,
Z(d), each does the same; changes of state send the same bytes from and to Z(d) as from and to S(d),
so the order is chosen after the plan. It holds for a whole region: the values that operators make
of one another row by row. A region of attention by rows gets it where every operator in it is known
to treat the rows of a shard alike; else its shards stay contiguous, and `unbalanced` says why.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from autoshard.planning.cost import tensor_bytes
from autoshard.planning.mixtures import is_mixture
from autoshard.planning.operators import ATTENTION, packet
from autoshard.planning.sizes import is_one
from autoshard.planning.strategy import ImplCollective, Strategy, operands, value
from autoshard.planning.values import output_state, producer
from autoshard.runtime.collectives import I, R, S, State, Z, shard_dim
from autoshard.runtime.masked_attention import MASKED_ATTENTION, masked_both_ends, masked_prefix
from autoshard.runtime.operators import (
    Bound,
    attend_by_heads,
    attend_to_both_ends,
    attend_to_prefix,
    loss_over_tokens,
    share_of_equal_mean,
    share_of_mean,
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


class WeightsOnly(set[fx.Node]):
    """The values of a graph that are made of parameters alone, told node by node in its order."""

    def note(self, node: fx.Node) -> None:
        """Take in the next node of the graph."""
        sources = node.all_input_nodes
        if node.op == "call_function" and sources and self.issuperset(sources):
            self.add(node)


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


# A value in a state, by which the program holds one tensor.
_Held = tuple[fx.Node, State]


class HeadTail:
    """The regions of one planned graph and the strategies with their order.

    copies, outputs: as in Decisions; also those with their order. outputs_contiguous: whether a
    sharded output must be contiguous. unbalanced: why attention by rows is, a line each.
    """

    def __init__(
        self,
        graph: fx.Graph,
        n: int,
        strategies: Mapping[fx.Node, Strategy],
        copies: Mapping[fx.Node, State],
        outputs: Sequence[State],
        outputs_contiguous: bool,
    ) -> None:
        self.n = n
        self.strategies, self.copies, self.outputs = dict(strategies), dict(copies), list(outputs)
        self.unbalanced: list[str] = []
        self._parent: dict[_Held, _Held] = {}
        self._wanted: list[tuple[_Held, fx.Node]] = []
        self._against: dict[_Held, str] = {}
        if not any(unequal(*one) for one in strategies.items()):
            return
        for node, strategy in strategies.items():
            self._look_at(node, strategy)
        results: Any = graph.output_node().args[0]
        for result, state in zip(results, outputs):
            if isinstance(result, fx.Node) and outputs_contiguous and shard_dim(state) is not None:
                self._refuse([(result, state)], "an output leaves as a contiguous shard")
        self._relabel(self._chosen(), results)

    # Regions

    def _look_at(self, node: fx.Node, strategy: Strategy) -> None:
        """Join what the operator makes of its operands row by row, or refuse it."""
        held = [(s, w) for s, w in zip(operands(node), strategy.inputs) if shard_dim(w) is not None]
        made = [one for one in self._results(node, strategy) if shard_dim(one[1]) is not None]
        every = [*held, *made]
        if not every:
            return
        if node.op != "call_function":
            self._refuse(every, f"{node.name} is stored as a contiguous shard")
            return
        sizes = [_fixed(value(source).shape[shard_dim(state)]) for source, state in every]
        known = {size for size in sizes if isinstance(size, int)}
        if not all(isinstance(size, int) for size in sizes):
            self._refuse(every, "the sequence is of symbolic length")
        elif len(known) > 1:
            self._refuse(every, f"{node.target} changes the number of rows")
        elif known.pop() % (2 * self.n):
            self._refuse(every, f"{2 * self.n} does not divide the rows of {node.target}")
        elif not _row_by_row(node, strategy):
            self._refuse(every, f"{node.target} depends on where a row stands")
        if unequal(node, strategy):
            self._wanted.append((every[0], node))
        for one in every[1:]:
            self._parent[self._find(one)] = self._find(every[0])

    def _results(self, node: fx.Node, strategy: Strategy) -> list[_Held]:
        if isinstance(strategy.output, str):
            return [(node, strategy.output)]
        return [
            (user, output_state(strategy, index))
            for user in node.users
            for owner, index in [producer(user)]
            if owner is node and index is not None
        ]

    def _find(self, one: _Held) -> _Held:
        at = one
        while self._parent.get(at, at) != at:
            at = self._parent[at]
        self._parent[one] = at
        return at

    def _refuse(self, held: Collection[_Held], why: str) -> None:
        for one in held:
            self._against.setdefault(one, why)

    def _chosen(self) -> set[_Held]:
        """The roots of the regions that get the order."""
        against: dict[_Held, str] = {}
        for one, why in self._against.items():
            against.setdefault(self._find(one), why)
        roots: set[_Held] = set()
        for one, node in self._wanted:
            root = self._find(one)
            if root in against:
                self.unbalanced.append(f"{node.name}: {against[root]}")
            else:
                roots.add(root)
        return roots

    # The states of what is chosen

    def _relabel(self, chosen: set[_Held], results: Sequence[Any]) -> None:
        def named(source: fx.Node, state: State) -> State:
            dim = shard_dim(state)
            if dim is None or (source, state) not in self._parent:
                return state
            return Z(dim) if self._find((source, state)) in chosen else state

        for node, strategy in self.strategies.items():
            inputs = tuple(named(s, w) for s, w in zip(operands(node), strategy.inputs))
            made = dict(self._results(node, strategy))
            if isinstance(strategy.output, str):
                output: Any = named(node, strategy.output)
            else:
                by_index = {producer(user)[1]: named(user, state) for user, state in made.items()}
                output = tuple(by_index.get(i, s) for i, s in enumerate(strategy.output))
            new = strategy._replace(inputs=inputs, output=output)
            if strategy.impl in BALANCED and output != strategy.output:
                new = new._replace(impl=BALANCED[strategy.impl], share=1.0)
            elif unequal(node, strategy):
                new = new._replace(share=contiguous_share(self.n))
            self.strategies[node] = new
        self.copies = {node: named(node, state) for node, state in self.copies.items()}
        self.outputs = [
            named(result, state) if isinstance(result, fx.Node) else state
            for result, state in zip(results, self.outputs)
        ]


def _fixed(size: Any) -> Any:
    """The number that a size is, also one that was a symbol before a guard fixed it."""
    return int(str(size)) if str(size).isdigit() else size


def in_plain_order(text: str) -> str:
    """A strategy's text or a state as the planner chose it, before the order."""
    plain = text.replace("Z(", "S(")
    for contiguous, balanced in BALANCED.items():
        plain = plain.replace(balanced.__name__, contiguous.__name__)
    return plain


def _row_by_row(node: fx.Node, strategy: Strategy) -> bool:
    """Whether the operator treats the rows of the sharded dim alike, wherever they stand. An ATen
    operator that runs on a shard as on the whole does, if it keeps their number; a user's, which a
    rule of theirs splits, may go by blocks of rows."""
    target = node.target
    if strategy.impl is not None:
        return getattr(strategy.impl, "function", strategy.impl) in _ALIKE_IMPLS
    if not isinstance(target, torch._ops.OpOverload):
        return False
    known = target.namespace == "aten" or target is MASKED_ATTENTION
    return known or torch.Tag.pointwise in target.tags


_ALIKE_IMPLS = (*BALANCED, loss_over_tokens, share_of_mean, share_of_equal_mean)
