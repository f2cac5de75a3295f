"""Which shards of a planned graph are in head-tail order, so that causal attention is balanced.

Attention by rows (`attend_to_prefix`) leaves the ranks of cp unequal work. In head-tail order,
Z(d), each does the same; changes of state send the same bytes from and to Z(d) as from and to S(d),
so the order is chosen after the plan. It holds for a whole region: the values that operators make
of one another row by row. A region of attention by rows gets it where every operator in it is known
to treat the rows of a shard alike; else its shards stay contiguous, and `unbalanced` says why.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from autoshard.planning.context_parallel import BALANCED, contiguous_share, unequal
from autoshard.planning.operators import RESHAPES, packet
from autoshard.planning.strategy import Strategy, operands, value
from autoshard.planning.values import output_state, producer
from autoshard.runtime.collectives import State, Z, shard_dim
from autoshard.runtime.masked_attention import MASKED_ATTENTION
from autoshard.runtime.operators import (
    loss_over_tokens,
    share_of_equal_mean,
    share_of_mean,
)

aten = torch.ops.aten

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
    """Whether the operator treats the rows of the sharded dim alike, wherever they stand."""
    if strategy.impl is not None:
        function = getattr(strategy.impl, "function", strategy.impl)
        return function in _ALIKE_IMPLS
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    if torch.Tag.pointwise in target.tags or packet(node) in _ALIKE:
        return True
    return packet(node) in RESHAPES | _RESHAPES


_ALIKE_IMPLS = (*BALANCED, loss_over_tokens, share_of_mean, share_of_equal_mean)

# What looks at other dims than the sharded one only, or sums over it, as the rules of these
# operators offer them; views whose sharded dim has as many rows before as after.
_ALIKE = frozenset(
    getattr(aten, name)
    for name in (
        *("linear", "addmm", "mm", "bmm", "matmul", "baddbmm", "einsum", "embedding"),
        *("layer_norm", "native_layer_norm", "rms_norm", "_fused_rms_norm", "softmax"),
        *("_softmax", "log_softmax", "_log_softmax", "scaled_dot_product_attention"),
        *("transpose", "permute", "t", "unsqueeze", "squeeze", "expand", "slice", "select"),
        *("split", "split_with_sizes", "chunk", "unbind", "cat", "stack", "sum", "mean"),
        *("cross_entropy_loss", "nll_loss", "nll_loss_nd", "_to_copy", "to", "clone"),
        *("contiguous", "alias", "detach", "index_select", "repeat_interleave"),
    )
    if hasattr(aten, name)
) | {MASKED_ATTENTION.overloadpacket}
_RESHAPES = frozenset({aten._unsafe_view, aten.flatten, aten.unflatten})
