"""Operators that already run over one axis, cp, where the graph of its rank is planned on tp.

Changes of state over cp, and the algorithms that a strategy on cp named (runtime/operators), are
operators of that graph like any other. A change of state is linear and rearranges one or two dims:
over tp it passes partial sums, and shards of any other dim. What is not known here stays whole on
tp, which is right for all of them: the ranks of tp then do the same over cp.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

from autoshard.planning.cost import COLLECTIVES, tensor_bytes
from autoshard.planning.rules.reductions import of_classes
from autoshard.planning.sizes import is_one, same_shape, why_not
from autoshard.planning.strategy import ImplCollective, Strategy, in_state, operands, results, value
from autoshard.runtime.collectives import Axis, I, P, R, S, State, change_steps, redistribute
from autoshard.runtime.collectives import shard_dim as dim_of
from autoshard.runtime.masked_attention import masked_both_ends, masked_prefix
from autoshard.runtime.operators import (
    MEAN,
    Bound,
    attend_by_heads,
    attend_to_both_ends,
    attend_to_prefix,
    loss_over_tokens,
    loss_over_tokens_and_classes,
    owned_experts,
    share_of_mean,
    split_parts,
)
from autoshard.runtime.randomness import on_shard, shared_seed, tracked_seeds

_REDUCTION = 3  # the position of `reduction` among the arguments of a loss


def axis_of(node: fx.Node) -> Axis | None:
    """The axis over which an operator of the graph runs already; None for an ordinary one."""
    if node.target is redistribute:
        return node.args[3]  # type: ignore[return-value]
    found = node.kwargs.get("axis")
    return found if isinstance(found, Axis) else None


def beside(node: fx.Node, n: int) -> list[Strategy]:
    """The strategies, on an axis of n ranks, of an operator that runs over another axis; whole on
    every rank first. Empty for any other operator."""
    if axis_of(node) is None:
        return []
    if node.target in (shared_seed, tracked_seeds):
        return [Strategy((), I, node.target)]  # type: ignore[arg-type]
    given = len(operands(node))
    found = [_priced(node, Strategy((I,) * given, in_state(node, I), _whole(node)), n)]
    if rule := _RULES.get(node.target):
        found += [_priced(node, one, n) for one in rule(node, n)]
    return list(dict.fromkeys(found))


def _whole(node: fx.Node) -> Bound | None:
    """What runs where no dim is split again. Of seeds from named states (`rng="tracker"`) a shard
    on the outer axis alone takes the one that is alike on this axis."""
    if node.target is on_shard and value(operands(node)[-1]).dim():
        return Bound.of(on_shard, **_constants(node))
    return None


def _changed(node: fx.Node, n: int) -> Iterator[Strategy]:
    """redistribute(x, src, dst, axis, extent)."""
    made, source = value(node), operands(node)[0]
    _, src, dst, *_ = node.args
    if made.is_floating_point() or made.is_complex():
        yield Strategy((R,), R)
        yield Strategy((P,), P)
    moved = {dim_of(src), dim_of(dst)}  # type: ignore[arg-type]
    for dim, size in enumerate(value(source).shape):
        if dim not in moved and why_not(size, n) is None:
            yield Strategy((S(dim),), S(dim))


def _attention(node: fx.Node, n: int) -> Iterator[Strategy]:
    """Attention by rows or by heads over cp: the batch and the heads."""
    axis = axis_of(node)
    assert axis is not None
    parts = axis.size if node.target is attend_by_heads else 1
    for states, output in _by_heads(node, n, parts):
        yield Strategy(states, output)


def _by_heads(node: fx.Node, n: int, parts: int = 1) -> Iterator[tuple[tuple[State, ...], State]]:
    """States of queries, keys, values and mask, and of the result, where n ranks split the batch or
    the heads, of which each takes a multiple of `parts`."""
    query, key, values, *mask = (one for one in map(value, operands(node)) if one.dim() > 1)
    heads = query.dim() - 3
    for dim in range(heads + 1):
        ranks = n * parts if dim == heads else n
        sizes = [one.shape[dim] for one in (query, key, values)]
        if all(isinstance(size, int) and size % ranks == 0 for size in sizes):
            masks = [_aligned(one, query.dim(), dim) for one in mask]
            yield (*[S(dim)] * 3, *masks), S(dim)


def _aligned(mask: torch.Tensor, rank: int, dim: int) -> State:
    """The state of a mask where dim `dim` of the queries, of `rank` dims, is split."""
    own = dim - (rank - mask.dim())
    return I if own < 0 or is_one(mask.shape[own]) else S(own)


def _mean_loss(node: fx.Node, n: int) -> Iterator[Strategy]:
    """loss_over_tokens: tokens split again, or classes."""
    scores, target, *weight = map(value, operands(node))
    if target.is_floating_point():
        return
    classes = 0 if scores.dim() == 1 else 1
    whole = (I,) * len(weight)
    for dim, size in enumerate(scores.shape):
        if why_not(size, n) is not None:
            continue
        op = node.kwargs["op"]
        if dim != classes:
            impl = Bound.of(loss_over_tokens, op=op)
            mean = len(node.args) <= _REDUCTION or node.args[_REDUCTION] == MEAN
            summed = (ImplCollective("all_reduce", 8),) if mean else ()
            yield Strategy((S(dim), S(dim - (dim > classes)), *whole), P, impl, summed)
        elif isinstance(size, int):
            impl = Bound.of(loss_over_tokens_and_classes, op=op, classes=size)
            if op is not torch.ops.aten.cross_entropy_loss.default:
                yield Strategy((S(dim), I, *whole), P, impl)
                continue
            traffic = of_classes(scores, target, bool(node.args[5:] and node.args[5]))
            yield Strategy((S(dim), I, *whole), I, impl, traffic)


def _random(node: fx.Node, n: int) -> Iterator[Strategy]:
    """on_shard: attention by batch and heads; what draws one number an element, along any dim."""
    if node.kwargs["op"] == "attention":
        for states, output in _by_heads(node, n):
            impl = Bound.of(on_shard, **_constants(node), inner_dim=dim_of(output))
            yield Strategy((*states, I), output, impl)
    if node.kwargs["op"] not in _DRAWN_ALONE:
        return
    *tensors, _ = operands(node)
    made = results(node)
    if not all(same_shape(one, made[0]) for one in (*made, *map(value, tensors))):
        return
    for dim, size in enumerate(made[0].shape):
        if isinstance(size, int) and why_not(size, n, even=True) is None:
            impl = Bound.of(on_shard, **_constants(node), inner_dim=dim)
            yield Strategy((*[S(dim)] * len(tensors), I), in_state(node, S(dim)), impl)


def _constants(node: fx.Node) -> dict[str, Any]:
    return {name: node.kwargs[name] for name in ("op", "dim", "extent")}


def _split_parts(node: fx.Node, n: int) -> Iterator[Strategy]:
    """split_parts(x, ..., sharded_dim): every other dim."""
    (x,) = map(value, operands(node))
    for dim, size in enumerate(x.shape):
        if dim != node.kwargs["sharded_dim"] and why_not(size, n) is None:
            yield Strategy((S(dim),), in_state(node, S(dim)))


def _share_of_mean(node: fx.Node, n: int) -> Iterator[Strategy]:
    """share_of_mean(x, dims, keepdim) of aten.mean.dim: the dims that stay."""
    if node.kwargs["op"] is not torch.ops.aten.mean.dim or len(node.args) < 2:
        return
    x, given = value(operands(node)[0]), node.args[1]
    reduced = {dim % x.dim() for dim in ([given] if isinstance(given, int) else given or ())}  # type: ignore[union-attr]
    keeps = len(node.args) > 2 and bool(node.args[2])
    for dim, size in enumerate(x.shape):
        if reduced and dim not in reduced and why_not(size, n) is None:
            yield Strategy((S(dim),), S(dim - (not keeps) * sum(one < dim for one in reduced)))


def _owned(node: fx.Node, n: int) -> Iterator[Strategy]:
    """owned_experts(x, ids, weights, stacks): tokens, which a rank's experts compute one by one."""
    stacks = operands(node)[3:]
    if node.kwargs.get("over") is None and why_not(value(node).shape[0], n) is None:
        yield Strategy((*[S(0)] * 3, *[R] * len(stacks)), S(0))


_DRAWN_ALONE = ("dropout", "native_dropout", "bernoulli", "bernoulli_p", "uniform", "normal")

_RULES: dict[Any, Callable[[fx.Node, int], Iterator[Strategy]]] = {
    redistribute: _changed,
    attend_to_prefix: _attention,
    masked_prefix: _attention,
    masked_both_ends: _attention,
    attend_to_both_ends: _attention,
    attend_by_heads: _attention,
    loss_over_tokens: _mean_loss,
    share_of_mean: _share_of_mean,
    split_parts: _split_parts,
    owned_experts: _owned,
    on_shard: _random,
}


# What the operator itself sends over the other axis, of which a shard on this one is an n-th.


def _priced(node: fx.Node, strategy: Strategy, n: int) -> Strategy:
    axis = axis_of(node)
    assert axis is not None
    sent = _sent(node, axis)
    parts = 1 if dim_of(strategy.outputs[0]) is None else n
    own = tuple(one._replace(nbytes=one.nbytes // parts) for one in sent)
    return strategy._replace(traffic=(*strategy.traffic, *own))


def _sent(node: fx.Node, axis: Axis) -> list[ImplCollective]:
    def over(op: str, nbytes: int, backward: bool) -> ImplCollective:
        return ImplCollective(op, nbytes, backward, axis.name, axis.size)

    if node.target is attend_by_heads:
        sizes = [tensor_bytes(value(one)) for one in operands(node)[:3]]
        sizes.append(tensor_bytes(value(node)))
        return [over("all_to_all", size, back) for back in (False, True) for size in sizes]
    if node.target is not redistribute:
        return []
    _, src, dst, *_ = node.args
    small = tensor_bytes(value(operands(node)[0])), tensor_bytes(value(node))
    steps = change_steps(src, dst)  # type: ignore[arg-type]
    return [
        over(step, min(small) if step == "all_to_all" else max(small), back)
        for step, back in zip(steps, (False, True))
        if step in COLLECTIVES
    ]
