"""Which part of a rank's graph runs on two halves of its rows, one beside the other: a proof.

Two halves are two ranks of an axis, so the sharding rules say what an operator does to each: with
`S(d)` in and `S(d)` out, and nothing sent between, an operator of half the rows makes half the
rows. Collectives of the planned axis are operators of such a graph too, which rearrange other dims
(rules/outer_axis.py). What is not made of the cut value, weights and masks, is whole; where a rule
asks for rows of it, it is cut as well.

The part starts at one of the first activations, or at what one of the first collectives moves:
where most can be hidden. It ends behind the last collective, where the least has to be put together
again.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from autoshard.planning import cost
from autoshard.planning.cost import COLLECTIVES
from autoshard.planning.operators import target_name
from autoshard.planning.rules import strategies
from autoshard.planning.strategy import Strategy, operands, value
from autoshard.planning.values import output_state, producer, tensor_bytes
from autoshard.runtime.collectives import Axis, S, State, change_steps, redistribute, shard_dim
from autoshard.runtime.graph_meta import DIFF
from autoshard.runtime.operators import unbound
from autoshard.runtime.randomness import on_shard

HALVES = 2
MOST_STARTS = 4
"""So many of each kind are tried: an operator that mixes rows early on is passed over."""


@dataclass(frozen=True)
class Halves:
    """The operators, in the order of the graph, that run on each half, with the states of their
    operands and results on an axis of two; `getitem`s of theirs have no strategy.

    collectives: the changes of state among them that communicate, forward or backward. reason: why
    there are none, or why those of the rest are not among them.
    """

    strategies: Mapping[fx.Node, Strategy | None] = field(default_factory=dict)
    collectives: Sequence[fx.Node] = ()
    reason: str = ""

    def state(self, node: fx.Node) -> State:
        """The state of a value of the part."""
        maker, index = producer(node)
        found = self.strategies[maker]
        assert found is not None
        return output_state(found, index)


def communicates(node: fx.Node, backward: bool | None = None) -> bool:
    """Whether a change of state sends something: in forward, in backward; None: in any."""
    if node.target is not redistribute:
        return False
    _, src, dst, axis, *_ = node.args
    assert isinstance(axis, Axis)
    forward, back = (one in COLLECTIVES for one in change_steps(src, dst))  # type: ignore[arg-type]
    back = back and bool(node.meta.get(DIFF))
    asked = forward or back if backward is None else (forward, back)[backward]
    return axis.size > 1 and asked


def find_halves(graph: fx.Graph, parameters: Collection[int], axis: Axis) -> Halves:
    """The part of a rank's forward graph that runs on halves; parameters: positions of their
    placeholders. axis: the planned one, whose collectives are to be hidden."""
    data = _of_inputs(graph, parameters)
    changes = [node for node in data if communicates(node) and node.args[3] == axis]
    if not changes:
        return Halves(reason="no collective of an activation to hide")
    nodes = list(graph.nodes)
    most = sum(cost.node_flops(one) for one in data if one < changes[-1])
    best, size, reasons = Halves(), (0, 0), dict[str, None]()
    offered: dict[fx.Node, tuple[list[Strategy], list[str]]] = {}
    for seed in _starts(data, changes):
        dim, reason = _dim(seed)
        if reason:
            reasons[reason] = None
        if dim is None:
            continue
        cut = _Cut(nodes, seed, dim, offered)
        found = cut.part(changes)
        if cut.reason:
            reasons[cut.reason] = None
        flops = sum(cost.node_flops(one) for one in found.strategies)
        if (len(found.collectives), flops) > size:
            best, size = found, (len(found.collectives), flops)
        if size[0] == len(changes) and flops >= most:
            break
    said = "" if len(best.collectives) == len(changes) else "; ".join(reasons)
    return Halves(best.strategies, best.collectives, said)


def _of_inputs(graph: fx.Graph, parameters: Collection[int]) -> list[fx.Node]:
    """What is made of the inputs of a call, and these, in the order of the graph."""
    data: dict[fx.Node, None] = {}
    inputs = 0
    for node in graph.nodes:
        if node.op == "placeholder":
            if inputs not in parameters:
                data[node] = None
            inputs += 1
        elif node.op == "call_function" and any(one in data for one in node.all_input_nodes):
            data[node] = None
    return list(data)


def _starts(data: Sequence[fx.Node], changes: Sequence[fx.Node]) -> list[fx.Node]:
    """The values that may be cut: the first activations, and what the first collectives move."""
    first = [one for one in data if _is_activation(value(one))][:MOST_STARTS]
    moved = [one.all_input_nodes[0] for one in changes[:MOST_STARTS]]
    return list(dict.fromkeys([*first, *moved]))


def _is_activation(val: object) -> bool:
    return isinstance(val, torch.Tensor) and val.is_floating_point() and val.dim() > 1


def _dim(seed: fx.Node) -> tuple[int | None, str]:
    """The dim along which a value is cut; why it is not the first."""
    shape = value(seed).shape
    if not all(isinstance(size, int) for size in shape):
        return None, "a size of it is known at run time only"
    if len(shape) > 1 and shape[0] % HALVES == 0:
        return 0, ""
    if len(shape) > 2 and shape[1] % HALVES == 0:
        return 1, f"the batch of {shape[0]} is not cut in two equal halves, so the next dim is"
    return None, f"neither the first nor the second of the dims {list(shape)} is even"


class _Cut:
    """What becomes of one value's halves."""

    def __init__(
        self,
        nodes: Sequence[fx.Node],
        seed: fx.Node,
        dim: int,
        offered: dict[fx.Node, tuple[list[Strategy], list[str]]],
    ) -> None:
        self.nodes, self.seed, self.dim, self.offered = nodes, seed, dim, offered
        self.chosen: dict[fx.Node, Strategy | None] = {}
        self.reason = ""

    def part(self, changes: Sequence[fx.Node]) -> Halves:
        mixed: set[fx.Node] = set()
        for node in self.nodes:
            inputs = node.all_input_nodes
            rows = any(one in self.chosen for one in inputs)
            if node.op != "call_function" or not (rows or self.seed in inputs):
                if any(one in mixed for one in inputs):
                    mixed.add(node)
                continue
            if node.target is operator.getitem and producer(node)[0] is not node:
                (mixed.add(node) if inputs[0] in mixed else self.chosen.setdefault(node, None))
                continue
            strategy = None if any(one in mixed for one in inputs) else self._strategy(node)
            if strategy is not None:
                self.chosen[node] = strategy
            elif rows:
                mixed.add(node)
        return self._ended([one for one in changes if one in self.chosen])

    def _ended(self, collectives: list[fx.Node]) -> Halves:
        """The part up to where, behind its last collective, the least is put together again."""
        if not collectives:
            return Halves()
        nodes = list(self.chosen)
        least, end = None, len(nodes)
        for i in range(nodes.index(collectives[-1]) + 1, len(nodes) + 1):
            out = [value(one) for one in leaving(nodes[:i])]
            if not all(isinstance(one, torch.Tensor) for one in out):
                continue  # an operator's results belong together
            size = sum(map(tensor_bytes, out))
            if least is None or size < least:
                least, end = size, i
        return Halves({one: self.chosen[one] for one in nodes[:end]}, collectives)

    def _strategy(self, node: fx.Node) -> Strategy | None:
        """The strategy that cuts the fewest whole values; None: no rule says that rows stay."""
        target = node.target
        if isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable:
            return None
        if node not in self.offered:
            self.offered[node] = strategies(node, HALVES)
        offered, reasons = self.offered[node]
        best, least = None, len(operands(node)) + 1
        for one in offered:
            cuts = self._cuts(node, one)
            if cuts is not None and cuts < least:
                best, least = one, cuts
        if best is None and not self.reason and any(i in self.chosen for i in node.all_input_nodes):
            why = f" ({'; '.join(reasons)})" if reasons else ""
            states = ", ".join(self._state(i) or "whole" for i in operands(node))
            self.reason = f"no rule says that {target_name(node)}{why} of {states} keeps rows apart"
        return best

    def _cuts(self, node: fx.Node, strategy: Strategy) -> int | None:
        """How many whole values a strategy would cut; None where it cannot be followed."""
        if any(not one.axis for one in strategy.traffic) or not _runs(node, strategy):
            return None
        states = [strategy.output] if isinstance(strategy.output, str) else strategy.output
        made = value(node)
        results = made if isinstance(made, (tuple, list)) else [made]
        if not states or not all(map(_has_halves, results, states)):
            return None
        cuts = 0
        for operand, want in zip(operands(node), strategy.inputs):
            have = self._state(operand)
            if have == want:
                continue
            dim = shard_dim(want)
            if have is not None and operand is not self.seed:
                return None
            if operand is self.seed and dim is None:
                continue  # read whole, as any other
            if dim is not None:
                if not _has_halves(value(operand), want):
                    return None
                cuts += 1
        return cuts

    def _state(self, node: fx.Node) -> State | None:
        """The state of a value on the axis of halves; None: it is whole."""
        if node is self.seed:
            return S(self.dim)
        maker, index = producer(node)
        found = self.chosen.get(maker)
        return None if found is None else output_state(found, index)


def _has_halves(val: torch.Tensor, state: State) -> bool:
    """Whether a value in that state has as many rows in one half as in the other."""
    dim = shard_dim(state)
    if dim is None:
        return False
    size = val.shape[dim]
    return isinstance(size, int) and size % HALVES == 0


def leaving(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """Those of some nodes that others read."""
    own = set(nodes)
    return [one for one in nodes if any(user not in own for user in one.users)]


def _runs(node: fx.Node, strategy: Strategy) -> bool:
    """Whether the operator itself runs on a half, or draws the numbers of its place."""
    if strategy.impl is None:
        return True
    function, _ = unbound(strategy.impl)
    seed = operands(node)[-1]
    return function is on_shard and "outer" not in node.kwargs and not value(seed).dim()
