"""Elementwise operators, torch's broadcasting and promotion made explicit; sums, means, extremes,
softmax, top-k and norms.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from autoshard.export.to_tensorrt.converters.network import Lowering, Tensor, converts
from autoshard.planning import arguments

aten = torch.ops.aten

_BINARY: dict[Any, str] = {
    aten.add.Tensor: "SUM",
    aten.sub.Tensor: "SUB",
    aten.mul.Tensor: "PROD",
    aten.div.Tensor: "DIV",
    aten.div.Tensor_mode: "FLOOR_DIV",
    aten.pow.Tensor_Tensor: "POW",
    aten.maximum.default: "MAX",
    aten.minimum.default: "MIN",
}
_LOGICAL: dict[Any, str] = {
    aten.bitwise_and.Tensor: "AND",
    aten.logical_and.default: "AND",
    aten.bitwise_or.Tensor: "OR",
    aten.logical_or.default: "OR",
}
_COMPARISONS: dict[str, tuple[str, ...]] = {
    "eq": ("EQUAL",),
    "lt": ("LESS",),
    "gt": ("GREATER",),
    "le": ("LESS", "EQUAL"),
    "ge": ("GREATER", "EQUAL"),
    "ne": ("NOT", "EQUAL"),
}
_UNARY: dict[Any, str] = {
    aten.neg.default: "NEG",
    aten.abs.default: "ABS",
    aten.exp.default: "EXP",
    aten.log.default: "LOG",
    aten.sqrt.default: "SQRT",
    aten.reciprocal.default: "RECIP",
    aten.sin.default: "SIN",
    aten.cos.default: "COS",
    aten.erf.default: "ERF",
    aten.floor.default: "FLOOR",
    aten.ceil.default: "CEIL",
}
_ACTIVATIONS: dict[Any, str] = {
    aten.tanh.default: "TANH",
    aten.sigmoid.default: "SIGMOID",
    aten.relu.default: "RELU",
}


def elementwise(low: Lowering, left: Tensor, right: Tensor, operation: str) -> Tensor:
    return low.out("add_elementwise", left, right, getattr(low.trt.ElementWiseOperation, operation))


def unary(low: Lowering, value: Tensor, operation: str) -> Tensor:
    return low.out("add_unary", value, getattr(low.trt.UnaryOperation, operation))


def activation(low: Lowering, value: Tensor, kind: str) -> Tensor:
    return low.out("add_activation", value, getattr(low.trt.ActivationType, kind))


def _result(node: fx.Node) -> torch.Tensor:
    val: torch.Tensor = node.meta["val"]
    return val


def _value(arg: Any) -> Any:
    """What torch promotes by: the fake of a node, or a number."""
    return arg.meta["val"] if isinstance(arg, fx.Node) else arg


@converts(*_BINARY)
def binary(low: Lowering, node: fx.Node) -> Tensor:
    """Arithmetic of two operands, in the type of the result."""
    if node.kwargs.get("rounding_mode", "floor") != "floor":
        raise low.error(f"divides with rounding_mode={node.kwargs.get('rounding_mode')!r}")
    dtype, rank = _result(node).dtype, _result(node).dim()
    left, right = (low.operand(arg, dtype, rank) for arg in node.args[:2])
    alpha = node.kwargs.get("alpha", 1)
    if alpha != 1:
        right = elementwise(low, right, low.scalar(alpha, dtype, rank), "PROD")
    return elementwise(low, left, right, _BINARY[node.target])


@converts(aten.pow.Tensor_Scalar)
def power(low: Lowering, node: fx.Node) -> Tensor:
    """Small whole powers by multiplication: a general power loses precision near zero."""
    dtype, rank = _result(node).dtype, _result(node).dim()
    base, exponent = low.operand(node.args[0], dtype, rank), node.args[1]
    if exponent in (2, 3):
        square = elementwise(low, base, base, "PROD")
        return square if exponent == 2 else elementwise(low, square, base, "PROD")
    return elementwise(low, base, low.scalar(exponent, dtype, rank), "POW")


@converts(*_LOGICAL)
def logical(low: Lowering, node: fx.Node) -> Tensor:
    """And, or; of truth values only."""
    rank = _result(node).dim()
    if _result(node).dtype != torch.bool:
        raise low.error(f"works on the bits of {_result(node).dtype}; engines have that of bool")
    left, right = (low.operand(arg, torch.bool, rank) for arg in node.args[:2])
    return elementwise(low, left, right, _LOGICAL[node.target])


@converts(aten.bitwise_not.default, aten.logical_not.default)
def negate(low: Lowering, node: fx.Node) -> Tensor:
    """Not; of truth values only."""
    if _value(node.args[0]).dtype != torch.bool:
        raise low.error(f"negates {_value(node.args[0]).dtype}; engines have that of bool")
    return unary(low, low[node.args[0]], "NOT")


@converts(*(getattr(getattr(aten, n), o) for n in _COMPARISONS for o in ("Tensor", "Scalar")))
def compare(low: Lowering, node: fx.Node) -> Tensor:
    """A comparison, in the type torch compares in."""
    target: Any = node.target
    operations = _COMPARISONS[target._schema.name.removeprefix("aten::")]
    dtype = torch.result_type(*(_value(arg) for arg in node.args[:2]))
    rank = _result(node).dim()
    left, right = (low.operand(arg, dtype, rank) for arg in node.args[:2])
    if operations[0] == "NOT":
        return unary(low, elementwise(low, left, right, operations[1]), "NOT")
    first, *others = (elementwise(low, left, right, operation) for operation in operations)
    return elementwise(low, first, others[0], "OR") if others else first


@converts(*_UNARY)
def function(low: Lowering, node: fx.Node) -> Tensor:
    return unary(low, low.cast(low[node.args[0]], _result(node).dtype), _UNARY[node.target])


@converts(aten.rsqrt.default)
def rsqrt(low: Lowering, node: fx.Node) -> Tensor:
    root = unary(low, low.cast(low[node.args[0]], _result(node).dtype), "SQRT")
    return unary(low, root, "RECIP")


@converts(*_ACTIVATIONS, aten.gelu.default)
def activate(low: Lowering, node: fx.Node) -> Tensor:
    """An activation TensorRT has; gelu is exact, or by tanh."""
    gelu = "GELU_TANH" if node.kwargs.get("approximate") == "tanh" else "GELU_ERF"
    return activation(low, low[node.args[0]], _ACTIVATIONS.get(node.target, gelu))


@converts(aten.silu.default)
def silu(low: Lowering, node: fx.Node) -> Tensor:
    x = low[node.args[0]]
    return elementwise(low, x, activation(low, x, "SIGMOID"), "PROD")


@converts(aten.where.self)
def where(low: Lowering, node: fx.Node) -> Tensor:
    dtype, rank = _result(node).dtype, _result(node).dim()
    condition = low.operand(node.args[0], torch.bool, rank)
    chosen = [low.operand(arg, dtype, rank) for arg in node.args[1:3]]
    return low.out("add_select", condition, *chosen)


@converts(aten.clamp.default)
def clamp(low: Lowering, node: fx.Node) -> Tensor:
    """Bounds below and above."""
    dtype, rank = _result(node).dtype, _result(node).dim()
    value, bounds = low.operand(node.args[0], dtype, rank), arguments(node)
    for bound, operation in (("min", "MAX"), ("max", "MIN")):
        if bounds[bound] is not None:
            value = elementwise(low, value, low.operand(bounds[bound], dtype, rank), operation)
    return value


@converts(aten._to_copy.default)
def to_copy(low: Lowering, node: fx.Node) -> Tensor:
    value, dtype = low[node.args[0]], _result(node).dtype
    if dtype == torch.bool and value.dtype != low.trt.bool:
        zero = low.scalar(0, _value(node.args[0]).dtype, _result(node).dim())
        return unary(low, elementwise(low, value, zero, "EQUAL"), "NOT")
    return low.cast(value, dtype)


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
