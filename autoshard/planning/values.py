"""Properties of a node for the planner: who decides its state, its bytes, where it may be split."""

import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import fx

from autoshard.planning import cost
from autoshard.planning.operators import UNFUSED, packet
from autoshard.planning.sizes import why_not
from autoshard.planning.strategy import Strategy, operands, results, value
from autoshard.runtime.collectives import I, S, State, shard_dim
from autoshard.runtime.graph_meta import DIFF


def producer(node: fx.Node) -> tuple[fx.Node, int | None]:
    """The node that decides `node`'s state, and which element of its tuple `node` is."""
    if node.target is operator.getitem:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        if isinstance(value(source), (tuple, list)):
            index = node.args[1]
            assert isinstance(index, int)
            return source, index
    return node, None


def output_state(strategy: Strategy, index: int | None) -> State:
    """The state of a strategy's result, or of one element of a tuple result (None: the first)."""
    return strategy.outputs[index or 0]


def state_of(node: fx.Node, strategies: Mapping[fx.Node, Strategy]) -> State:
    """The state in which a value is made."""
    owner, index = producer(node)
    return output_state(strategies[owner], index)


def global_bytes(node: fx.Node) -> int:
    """Bytes of the whole (unsharded) value; symbolic sizes count with their hints."""
    return cost.tensor_bytes(value(node))


def stored_domain(node: fx.Node, n: int, even: bool = False) -> list[State]:
    """The states a parameter may be stored in: whole, or split along a dim by the chunk rule;
    even: along those that n ranks divide only."""
    if n == 1:
        return [I]
    shape = value(node).shape
    return [I] + [S(d) for d, e in enumerate(shape) if e >= n and not (even and e % n)]


def splits_evenly(node: fx.Node, strategy: Strategy, n: int) -> bool:
    """Whether a strategy gives each of n ranks as many rows, of operands and of results."""
    read = zip(map(value, operands(node)), strategy.inputs)
    for tensor, state in (*read, *zip(results(node), strategy.outputs)):
        dim = shard_dim(state) if isinstance(tensor, torch.Tensor) else None
        if dim is not None and cost.hint(tensor.shape[dim]) % n:
            return False
    return True


def shardable(tensor: torch.Tensor, n: int) -> list[State]:
    """The S states of a value that leave no rank empty; symbolic sizes must divide."""
    if n == 1:
        return []
    return [S(dim) for dim, size in enumerate(tensor.shape) if why_not(size, n) is None]


def fusible(node: fx.Node) -> bool:
    """Whether a compiler joins the operator to its neighbours: no product, lookup or sort."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return node.target is operator.getitem
    return packet(node) not in UNFUSED and cost.node_flops(node) == 0


def differentiable(node: fx.Node) -> bool:
    """Whether a gradient can flow to the node."""
    return bool(node.meta.get(DIFF))


def is_trained(gm: fx.GraphModule) -> bool:
    """Whether a gradient can flow to anything in a graph."""
    return any(map(differentiable, gm.graph.nodes))


def is_loss(node: Any) -> bool:
    """Whether what a graph returns is a scalar that has a gradient."""
    made = value(node) if isinstance(node, fx.Node) else None
    return isinstance(made, torch.Tensor) and made.dim() == 0 and differentiable(node)


def as_key(arguments: Iterable[Any], of: Callable[[fx.Node], Any]) -> tuple[Any, ...]:
    """The arguments of a node as a key, in which each node among them is what `of` says of it."""
    found: list[Any] = []
    for one in arguments:
        if isinstance(one, fx.Node):
            found.append(of(one))
        elif isinstance(one, (tuple, list)):
            found.append((type(one), as_key(one, of)))
        elif isinstance(one, dict):
            found.append((type(one), tuple(one), as_key(one.values(), of)))
        else:
            found.append((type(one), repr(one)))
    return tuple(found)
