"""Sums, means, extremes, softmax, top-k and norms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from autoshard.export.to_tensorrt.converters.network import Lowering, Tensor, converts
from autoshard.export.to_tensorrt.converters.pointwise import elementwise, unary
from autoshard.planning import arguments

aten = torch.ops.aten


def _mask(dims: Sequence[int], rank: int) -> int:
    return sum(1 << (dim % rank) for dim in dims)


_REDUCTIONS: dict[Any, str] = {
    aten.sum.dim_IntList: "SUM",
    aten.mean.dim: "AVG",
    aten.amax.default: "MAX",
    aten.amin.default: "MIN",
}


def _reduce(low: Lowering, node: fx.Node, x: Tensor, operation: str) -> Tensor:
    """Over the dims that the node names (absent or empty: all)."""
    rank, given = len(x.shape), arguments(node)
    dims = given["dim"]
    mask = _mask([dims] if isinstance(dims, int) else list(dims or range(rank)), rank)
    return low.out(
        "add_reduce", x, getattr(low.trt.ReduceOperation, operation), mask, bool(given["keepdim"])
    )


@converts(*_REDUCTIONS)
def reduction(low: Lowering, node: fx.Node) -> Tensor:
    """In the type of the result."""
    x = low.cast(low[node.args[0]], node.meta["val"].dtype)
    return _reduce(low, node, x, _REDUCTIONS[node.target])


@converts(aten.any.dim)
def some(low: Lowering, node: fx.Node) -> Tensor:
    """Whether any is true; engines reduce numbers only."""
    number = low.cast(low[node.args[0]], torch.int32)
    largest = _reduce(low, node, number, "MAX")
    zero = low.scalar(0, torch.int32, len(largest.shape))
    return unary(low, elementwise(low, largest, zero, "EQUAL"), "NOT")


@converts(aten.cumsum.default)
def cumsum(low: Lowering, node: fx.Node) -> Tensor:
    x = low.cast(low[node.args[0]], node.meta["val"].dtype)
    dim: Any = node.args[1]
    axis = low.constant(torch.tensor(dim % len(x.shape), dtype=torch.int32))
    return low.out("add_cumulative", x, axis, low.trt.CumulativeOperation.SUM, False, False)


@converts(aten.softmax.int, aten._softmax.default)
def softmax(low: Lowering, node: fx.Node) -> Tensor:
    dim: Any = node.args[1]
    layer = low.add("add_softmax", low.cast(low[node.args[0]], node.meta["val"].dtype))
    layer.axes = _mask([dim], len(layer.get_output(0).shape))
    return layer.get_output(0)


@converts(aten.topk.default)
def topk(low: Lowering, node: fx.Node) -> tuple[Tensor, Tensor]:
    """The largest or smallest k of one dim, with where they are."""
    given = arguments(node)
    x, k = low[given["self"]], given["k"]
    if not isinstance(k, int):
        raise low.error("takes a number of values that is not known before it runs")
    operation = getattr(low.trt.TopKOperation, "MAX" if given["largest"] else "MIN")
    layer = low.add("add_topk", x, operation, k, _mask([given["dim"]], len(x.shape)))
    return layer.get_output(0), low.cast(layer.get_output(1), torch.int64)


@converts(aten.argmax.default)
def argmax(low: Lowering, node: fx.Node) -> Tensor:
    """Where the largest of one dim is."""
    given = arguments(node)
    x, dim = low[given["self"]], given["dim"]
    if not isinstance(dim, int):
        raise low.error("looks for the largest of all dims; engines look along one")
    layer = low.add("add_topk", x, low.trt.TopKOperation.MAX, 1, _mask([dim], len(x.shape)))
    where = low.cast(layer.get_output(1), torch.int64)
    if given["keepdim"]:
        return where
    return low.out("add_squeeze", where, low.constant(torch.tensor([dim % len(x.shape)])))


@converts(aten.layer_norm.default)
def layer_norm(low: Lowering, node: fx.Node) -> Tensor:
    """Layer norm over the last dims."""
    given = arguments(node)
    x, shape = low[given["input"]], given["normalized_shape"]
    rank = len(x.shape)
    dtype = node.meta["val"].dtype
    factors = []
    for name, plain in (("weight", 1.0), ("bias", 0.0)):
        arg = given[name]
        if arg is None:
            value = low.constant(torch.full(tuple(shape), plain, dtype=dtype))
        else:
            value = low[arg]
        factors.append(low.with_rank(low.cast(value, dtype), rank))
    axes = _mask(range(rank - len(shape), rank), rank)
    layer = low.add("add_normalization_v2", x, *factors, axes)
    layer.epsilon = float(given["eps"])
    return layer.get_output(0)
