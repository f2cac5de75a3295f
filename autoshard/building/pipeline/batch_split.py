"""The states of a serial graph's values when its batch is split: a proof that it can be.

A micro-batch is a shard of the batch, so the sharding rules say what becomes of each value on an
axis of as many ranks as there are micro-batches: `S(d)`, rows of some of the samples; `R`, alike
for all of them, made of parameters, whose gradients add up; `P`, a part of a sum (the loss). No
value may change its state in between, for that would mix samples of different micro-batches.

Values that are made of no parameter (positions, masks, labels, counts of them) are *shared*: they
are computed for the whole batch, of which each micro-batch takes its rows.

Mean losses as sums over the whole batch's tokens, so that micro-batches add up to them.

    before                                     after
    %0: f32[] = cross_entropy_loss(%x, %t)     %0: f32[] = cross_entropy_loss(%x, %t, reduction=2)
                                               %1: f32[] = own_tokens(%t, None, -100, ())
                                               %2: f32[] = div(%0, %1)

The count is of the whole batch, made of the labels alone: each micro-batch divides its sum by it.
"""

import math
import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autoshard.errors import CaptureError
from autoshard.passes import emit
from autoshard.planning import LOSSES, Strategy, operands, packet, producer, state_of, value
from autoshard.planning.rules import strategies
from autoshard.runtime.collectives import Axis, I, P, R, S, State, is_head_tail, shard_dim
from autoshard.runtime.errors import source_line
from autoshard.runtime.graph_meta import DIFF
from autoshard.runtime.operators import MEAN, own_tokens


@dataclass(frozen=True)
class BatchSplit:
    """own: the nodes that depend on a parameter. strategies: of those and of placeholders, on an
    axis of `microbatches`."""

    microbatches: int
    own: frozenset[fx.Node]
    strategies: Mapping[fx.Node, Strategy]

    def state(self, node: fx.Node) -> State:
        """The state of one of the `own` values, or of an input."""
        return state_of(node, self.strategies)


def split_batch(
    serial: fx.GraphModule,
    parameters: Collection[fx.Node],
    batch: Mapping[fx.Node, State],
    microbatches: int,
) -> BatchSplit:
    """How the graph runs on one of `microbatches` equal parts of its batch.

    batch: the state of each input that has a dim for samples, and of their numbers. Raises
    CaptureError, with the line, for an operator that mixes samples, or of which no rule says that
    it does not.
    """
    splitting = _Splitting(microbatches)
    for node in serial.graph.nodes:
        if node.op in ("placeholder", "get_attr") or node in batch:
            splitting.input(node, node in parameters, batch.get(node, I))
        elif node.op == "call_function":
            splitting.operator(node)
    return BatchSplit(microbatches, frozenset(splitting.own), splitting.chosen)


class _Splitting:
    def __init__(self, n: int) -> None:
        self.n = n
        self.own: set[fx.Node] = set()
        self.chosen: dict[fx.Node, Strategy] = {}
        self.parameter = R if n > 1 else I

    def input(self, node: fx.Node, is_parameter: bool, state: State) -> None:
        if is_parameter:
            self.own.add(node)
        self.chosen[node] = Strategy((), self.parameter if is_parameter else state)

    def operator(self, node: fx.Node) -> None:
        inputs = node.all_input_nodes
        if any(each in self.own for each in inputs):
            self.own.add(node)
        if node.target is operator.getitem and producer(node)[0] is not node:
            return
        offered, reasons = strategies(node, self.n)
        best, most = None, -1
        for strategy in offered:
            fit = self._fit(node, strategy)
            if fit is not None and fit > most:
                best, most = strategy, fit
        if best is None and node in self.own:
            best = self._with_copies(node, offered)
            if best is None:
                states = [f"{each.name} {state_of(each, self.chosen)}" for each in operands(node)]
                raise _mixes(node, states, reasons)
        self.chosen[node] = best or self._as_computed(node, offered[0])

    def _as_computed(self, node: fx.Node, whole: Strategy) -> Strategy:
        """A shared value that no rule is known of: with rows of samples where an operand has them
        along a dim of the same size. It says what is read first, not what is right: the rules of
        the readers do."""
        val = value(node)
        for operand in operands(node):
            dim = shard_dim(state_of(operand, self.chosen))
            if dim is None or not isinstance(val, torch.Tensor) or val.dim() <= dim:
                continue
            if val.shape[dim] == value(operand).shape[dim]:
                return whole._replace(output=S(dim))
        return whole

    def _fit(self, node: fx.Node, strategy: Strategy) -> int | None:
        """How many operands are in the states they are made in; None where the strategy would
        change the state of a value, or communicate."""
        if strategy.traffic:
            return None
        own, fit = node in self.own, 2 * len(operands(node))
        if not own and P in strategy.output:  # a sum over the batch is shared
            return None
        for operand, want in zip(operands(node), strategy.inputs):
            if self._has(operand, want):
                continue
            if not own or not self._can_cut(operand, want):
                return None
            fit -= 2  # rows of a shared value, or all of one that has rows
        return fit + _expands(node, strategy)

    def _has(self, operand: fx.Node, want: State) -> bool:
        have = state_of(operand, self.chosen)
        return have == want or (_whole(have) and _whole(want) and not operand.meta.get(DIFF))

    def _with_copies(self, node: fx.Node, offered: Sequence[Strategy]) -> Strategy | None:
        """A strategy of a node that reads rows of values that were made whole (rows of a table by
        the positions of each sample), from copies of these that are made in rows."""
        for strategy in offered:
            if (made := self._operands_as(node, strategy)) is not None:
                _read_instead(node, made)
                return strategy
        return None

    def _operands_as(self, node: fx.Node, strategy: Strategy) -> dict[fx.Node, fx.Node] | None:
        """What a strategy reads instead of each operand; None where one cannot be had so. What is
        read twice, each time in another state, would need two copies."""
        given = dict.fromkeys(zip(operands(node), strategy.inputs))
        made = {} if strategy.traffic else {one: self._as(one, want) for one, want in given}
        found = {one: copy for one, copy in made.items() if copy is not None}
        return found if found and len(found) == len(given) else None

    def _as(self, operand: fx.Node, want: State) -> fx.Node | None:
        """A value in a state: itself, or a copy made by another strategy; None where none is."""
        if self._has(operand, want) or self._can_cut(operand, want):
            return operand
        if operand not in self.own or operand.op != "call_function" or shard_dim(want) is None:
            return None
        for strategy in (
            strategies(operand, self.n)[0] if _whole(state_of(operand, self.chosen)) else ()
        ):
            made = self._operands_as(operand, strategy) if strategy.output == want else None
            if made is None:
                continue
            with operand.graph.inserting_after(operand):
                copy = operand.graph.node_copy(operand, lambda one: one)
            _read_instead(copy, made)
            self.own.add(copy)
            self.chosen[copy] = strategy
            return copy
        return None

    def _can_cut(self, shared: fx.Node, want: State) -> bool:
        if shared in self.own:
            return False
        dim = shard_dim(want)
        if dim is None:
            return _whole(want)
        return not is_head_tail(want) and value(shared).shape[dim] % self.n == 0


def _read_instead(node: fx.Node, others: Mapping[fx.Node, fx.Node]) -> None:
    for one, other in others.items():
        if other is not one:
            node.replace_input_with(one, other)


def _expands(node: fx.Node, strategy: Strategy) -> int:
    """1 where a value without samples (a class token) is made for those of the batch."""
    if packet(node) not in (aten.expand, aten.repeat) or not isinstance(strategy.output, str):
        return 0
    return int(shard_dim(strategy.output) == 0 and _whole(strategy.inputs[0]))


def _whole(state: State) -> bool:
    return state in (I, R)


def _mixes(node: fx.Node, states: list[Any], reasons: list[str]) -> CaptureError:
    said = f" ({'; '.join(reasons)})" if reasons else ""
    return CaptureError(
        f"pp runs a batch in micro-batches, and no rule says that {node.target} does the same "
        f"to each sample alone, given {', '.join(states) or 'nothing'}{said}",
        where=source_line(node.meta.get("stack_trace")),
        remedy="Compute what joins samples outside of the compiled model, give the operator a "
        "rule (autoshard.sharding_rule), or set options={'pipeline': {'microbatches': 1}}.",
    )


aten = torch.ops.aten

_SUM = 2  # at::Reduction
_NAMES = ("self", "target", "weight", "reduction", "ignore_index", "label_smoothing")
_DEFAULTS: dict[str, Any] = {"weight": None, "reduction": MEAN, "ignore_index": -100}
_NAME = "token_means"
_GIVEN = "rows_of_inputs"


def sum_over_tokens(gm: fx.GraphModule, ranks: Sequence[Axis] = ()) -> int:
    """Rewrite the mean losses over classes in a serial graph, in place. Returns how many.

    ranks: data-parallel axes. With them the count is of the tokens of all ranks, divided by their
    number: gradients are averaged over the ranks, and their mean is that over every token.
    """
    found = 0
    for node in list(gm.graph.nodes):
        if packet(node) not in LOSSES:
            continue
        given = {**_DEFAULTS, **dict(zip(_NAMES, node.args)), **node.kwargs}
        if given["reduction"] != MEAN or value(given["target"]).is_floating_point():
            continue
        _rewrite(gm.graph, node, given, tuple(ranks))
        found += 1
    return found


def without_broadcasts(gm: fx.GraphModule) -> None:
    """Replace the lists of broadcast tensors in a serial graph (of `mse_loss`) by their entries."""
    for node in gm.graph.find_nodes(op="call_function", target=aten.broadcast_tensors.default):
        for item in list(node.users):
            source = node.args[0][item.args[1]]
            if value(source).shape != value(item).shape:
                with gm.graph.inserting_before(item):
                    shape = list(value(item).shape)
                    source = emit(
                        gm.graph, item, aten.expand.default, (source, shape), provenance=_NAME
                    )
            item.replace_all_uses_with(source)
            gm.graph.erase_node(item)
        gm.graph.erase_node(node)


def with_rows(gm: fx.GraphModule, node: fx.Node, samples: int) -> fx.Node:
    """Read an input of so many samples by their numbers in a serial graph, as a table is: a
    micro-batch then takes those of its own, and its gradients add up to that of the whole. Returns
    the numbers."""
    readers = list(node.users)
    first = next(n for n in gm.graph.nodes if n.op != "placeholder")
    with gm.graph.inserting_before(first):
        numbers = emit(
            gm.graph,
            node,
            aten.arange.default,
            (samples,),
            {"device": value(node).device},
            provenance=_GIVEN,
            value="unknown",
        )
        numbers.meta["val"] = value(node).detach().new_empty(samples, dtype=torch.int64)
        rows = emit(
            gm.graph, node, aten.index_select.default, (node, 0, numbers), provenance=_GIVEN
        )
    for reader in readers:
        reader.replace_input_with(node, rows)
    return numbers


def _rewrite(
    graph: fx.Graph, node: fx.Node, given: dict[str, Any], ranks: tuple[Axis, ...]
) -> None:
    arguments = (given["target"], given["weight"], given["ignore_index"], ranks)
    summed = {name: given[name] for name in _NAMES[2:] if name in given}
    with graph.inserting_before(node):
        total = emit(
            graph,
            node,
            node.target,  # type: ignore[arg-type]
            (given["self"], given["target"]),
            {**summed, "reduction": _SUM},
            provenance=_NAME,
            value=node,
        )
        count = emit(graph, node, own_tokens, arguments, provenance=_NAME, value="unknown")
        count.meta["val"] = value(node).detach().new_empty((), dtype=torch.float32)
        if ranks:
            batches = math.prod(axis.size for axis in ranks)
            count = emit(graph, node, aten.div.Scalar, (count, batches), provenance=_NAME)
        dtype = value(node).dtype
        count = emit(
            graph, node, aten._to_copy.default, (count,), {"dtype": dtype}, provenance=_NAME
        )
        mean = emit(graph, node, aten.div.Tensor, (total, count), provenance=_NAME)
    node.replace_all_uses_with(mean)
    graph.erase_node(node)
