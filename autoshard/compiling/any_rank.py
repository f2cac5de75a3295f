"""One graph for every rank of an axis: the rank's number is a value in it, not a part of its text.

    before (rank 1 of 2)                          after (any rank)
    %0 = redistribute(%x, I, S(0), Axis(tp, 2, 1))   %n = get_attr(rank_of_tp)
                                                     %0 = redistribute(%x, I, S(0), Axis(tp, 2, %n))
    %1 = redistribute(%w, I, R, Axis(tp, 2, 1))      %1 = redistribute(%w, I, R, Axis(tp, 2, 0))

Inductor's caches are keyed by graphs, so what one rank compiled is then loaded by the others, and
by a rank that has another number after a restart. Where the number is read, it is a tensor, a
buffer of the graph: the start of a slice, the first class of a vocabulary. Else it is 0.

A rank keeps its own graph where the number decides a shape or what runs: rows that the axis does
not divide, head-tail order, causal prefixes, random numbers on two axes, a padding index, padding
with zeros.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autoshard.runtime.collectives import (
    Axis,
    change_steps,
    is_head_tail,
    redistribute,
    shard_dim,
)
from autoshard.runtime.operators import (
    share_of_equal_mean,
    share_of_mean,
    vocab_parallel_cross_entropy,
    vocab_parallel_embedding,
    vocab_parallel_nll,
)
from autoshard.runtime.parameters import unshard
from autoshard.runtime.randomness import on_shard, shared_seed, tracked_seeds

_UNREAD, _VALUE, _TEXT = "unread", "value", "text"
"""How a node needs the number: not at all; as a value; as text, to choose shapes or operators."""


def for_any_rank(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy of a local graph, as above; `gm` itself where no node of it holds an axis."""
    if not any(map(_axes, gm.graph.nodes)):
        return gm
    graph, held = fx.Graph(), dict[str, Any]()
    numbers: dict[str, fx.Node] = {}
    copies: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.nodes:
        if node.op == "get_attr":
            held[node.target] = operator.attrgetter(node.target)(gm)
        need = _need(node)
        if need is _VALUE:
            (axis,) = _axes(node)
            if axis.name not in numbers:
                name = f"rank_of_{axis.name}"
                held[name] = number_on(node.meta["val"].device, axis.rank)
                numbers[axis.name] = graph.get_attr(name)
        copies[node] = new = graph.node_copy(node, copies.__getitem__)
        if need is not _TEXT:
            rank: Any = numbers[axis.name] if need is _VALUE else 0
            new.args, new.kwargs = _with_rank(new.args, rank), _with_rank(dict(new.kwargs), rank)
    found = fx.GraphModule(held, graph).train(gm.training)
    found.meta = dict(gm.meta)
    return found


def is_for_any_rank(gm: fx.GraphModule) -> bool:
    """Whether every rank of the axes has the graph that `for_any_rank` makes of this one's."""
    return all(_need(node) is not _TEXT for node in gm.graph.nodes if _axes(node))


def _axes(node: fx.Node) -> list[Axis]:
    """Every axis in a node's arguments."""
    leaves = pytree.tree_leaves((node.args, dict(node.kwargs)), is_leaf=_is_axis)
    return [one for one in leaves if _is_axis(one)]


def _with_rank(arguments: Any, rank: Any) -> Any:
    """The arguments, each axis of them as the rank of that number has it."""
    return pytree.tree_map(
        lambda one: one._replace(rank=rank) if _is_axis(one) else one, arguments, is_leaf=_is_axis
    )


def _is_axis(argument: Any) -> bool:
    return isinstance(argument, Axis)


def number_on(device: torch.device, number: int) -> torch.Tensor:
    """A number as a tensor without dims."""
    return torch.tensor(number, device=device)


def _need(node: fx.Node) -> str:
    need = _NEEDS.get(node.target)  # type: ignore[arg-type]
    return _TEXT if need is None else need(node)


def _of_change(node: fx.Node) -> str:
    src, dst = _given(node, "src"), _given(node, "dst")
    steps = change_steps(src, dst)
    uneven = _given(node, "extent") is not None
    if uneven or is_head_tail(src) or is_head_tail(dst) or "pad" in steps:
        return _TEXT
    if "slice" not in steps:
        return _UNREAD
    split, whole = (dst, _given(node, "x")) if steps[0] == "slice" else (src, node)
    dim = shard_dim(split)
    return _TEXT if dim is None else _value_where(whole.meta["val"].shape[dim], node)


def _of_parameter(node: fx.Node) -> str:
    """What gathers a stored parameter knows itself who has which part."""
    outer = _given(node, "outer")
    uneven = _given(node, "extent") is not None or (outer is not None and outer[2] is not None)
    return _TEXT if uneven else _UNREAD


def _of_lookup(node: fx.Node) -> str:
    return _TEXT if _given(node, "padding_idx") >= 0 else _value_where(_given(node, "rows"), node)


def _of_loss(node: fx.Node) -> str:
    smoothed = node.target is vocab_parallel_cross_entropy and _given(node, "label_smoothing")
    return _TEXT if smoothed else _value_where(_given(node, "classes"), node)


def _of_draw(node: fx.Node) -> str:
    """Elements are counted from the first that the rank holds."""
    if _given(node, "outer") is not None:
        return _TEXT
    extent = _given(node, "extent")
    return _VALUE if extent is None else _value_where(extent, node)


def _value_where(extent: Any, node: fx.Node) -> str:
    """Ranks have as many rows as each other only where the axis divides them."""
    (axis,) = _axes(node)
    return _VALUE if isinstance(extent, int) and extent % axis.size == 0 else _TEXT


def _given(node: fx.Node, name: str) -> Any:
    """An argument of the function that a node calls, by its name."""
    bound = _signature(node.target).bind(*node.args, **node.kwargs)
    bound.apply_defaults()
    return bound.arguments[name]


@functools.cache
def _signature(function: Any) -> inspect.Signature:
    return inspect.signature(function)


def _unread(node: fx.Node) -> str:
    return _UNREAD


_NEEDS: dict[Callable[..., Any], Callable[[fx.Node], str]] = {
    redistribute: _of_change,
    unshard: _of_parameter,
    vocab_parallel_embedding: _of_lookup,
    vocab_parallel_cross_entropy: _of_loss,
    vocab_parallel_nll: _of_loss,
    on_shard: _of_draw,
    shared_seed: _unread,
    tracked_seeds: _unread,
    share_of_mean: _unread,
    share_of_equal_mean: _unread,
}
"""By function; one that is not here keeps the number in its graph's text."""
