"""Matrix products, weights of 8 or 4 bits in them; convolutions and pools over 1, 2 or 3 dims.

Attention and the key-value cache, one layer each.
"""

from typing import Any

import torch
from torch import fx

from autoshard.export import rank_graph
from autoshard.export.to_tensorrt.converters.arithmetic import elementwise
from autoshard.export.to_tensorrt.converters.network import Lowering, Tensor, converts
from autoshard.planning import arguments

aten = torch.ops.aten


def _product(low: Lowering, left: Tensor, right: Tensor, transposed: bool) -> Tensor:
    rank = max(len(left.shape), len(right.shape))
    none, turned = low.trt.MatrixOperation.NONE, low.trt.MatrixOperation.TRANSPOSE
    return low.out(
        "add_matrix_multiply",
        low.with_rank(left, rank),
        none,
        low.with_rank(right, rank),
        turned if transposed else none,
    )


@converts(aten.linear.default)
def linear(low: Lowering, node: fx.Node) -> Tensor:
    x, weight = low[node.args[0]], low[node.args[1]]
    if len(x.shape) < 2:
        raise low.error("is a linear layer of a vector; engines have it of a matrix or more")
    out = _product(low, x, weight, transposed=True)
    bias = arguments(node)["bias"]
    if bias is None:
        return out
    return elementwise(low, out, low.with_rank(low[bias], len(out.shape)), "SUM")


@converts(aten.matmul.default)
def matmul(low: Lowering, node: fx.Node) -> Tensor:
    """A product of matrices, dims in front broadcast."""
    left, right = low[node.args[0]], low[node.args[1]]
    if min(len(left.shape), len(right.shape)) < 2:
        raise low.error("multiplies a vector; engines multiply matrices")
    return _product(low, left, right, transposed=False)


@converts(aten.addmm.default)
def addmm(low: Lowering, node: fx.Node) -> Tensor:
    if any(node.kwargs.get(name, 1) != 1 for name in ("alpha", "beta")):
        raise low.error(f"scales its terms: {dict(node.kwargs)}")
    out = _product(low, low[node.args[1]], low[node.args[2]], transposed=False)
    return elementwise(low, out, low.with_rank(low[node.args[0]], len(out.shape)), "SUM")


@converts(aten.convolution.default)
def convolution(low: Lowering, node: fx.Node) -> Tensor:
    """A convolution; over one dim as over two, one of them of size 1, which engines have."""
    given: list[Any] = [low[arg] for arg in node.args]
    x, kernel, bias, stride, padding, dilation, transposed, _, groups = given
    if transposed:
        raise low.error("is a transposed convolution, which has no converter")
    sizes: Any = node.args[1].meta["val"].shape  # type: ignore[union-attr]
    line = len(sizes) == 3
    window = tuple(sizes[2:])
    if line:
        end = low.constant(torch.tensor([2]))
        x, kernel = (low.out("add_unsqueeze", tensor, end) for tensor in (x, kernel))
        window, stride = (1, *window), (1, *stride)
        padding, dilation = (0, *padding), (1, *dilation)
    layer = low.add("add_convolution_nd", x, sizes[0], window, low.trt.Weights())
    layer.set_input(1, kernel)
    if bias is not None:
        layer.set_input(2, bias)
    layer.stride_nd, layer.dilation_nd = tuple(stride), tuple(dilation)
    layer.padding_nd, layer.num_groups = tuple(padding), groups
    out = layer.get_output(0)
    return low.out("add_squeeze", out, low.constant(torch.tensor([2]))) if line else out


@converts(aten.max_pool2d_with_indices.default)
def max_pool(low: Lowering, node: fx.Node) -> tuple[Tensor, None]:
    """The largest of each window; where it was, no engine says."""
    given = arguments(node)
    window = given["kernel_size"]
    if given["ceil_mode"] or set(given["dilation"]) != {1}:
        raise low.error("pools with ceil_mode or dilation; engines pool without")
    if any(user.args[1] != 0 for user in node.users):
        raise low.error("says where the largest of a window was; engines say what it is")
    layer = low.add("add_pooling_nd", low[node.args[0]], low.trt.PoolingType.MAX, tuple(window))
    layer.stride_nd, layer.padding_nd = tuple(given["stride"] or window), tuple(given["padding"])
    return layer.get_output(0), None


@converts(rank_graph.dequantize)
def dequantize(low: Lowering, node: fx.Node) -> Tensor:
    """Scales of whole rows along one axis, others by blocks. Values and scales are constants."""
    given: Any = node.args
    weight, rows = low.graph.weights[str(given[0].target)], tuple(given[2])
    values, scale = (low[arg] for arg in given[:2])
    assert weight.quantized is not None
    names = {torch.float8_e4m3fn: "FP8", torch.int8: "INT8"}
    kind = "INT4" if weight.quantized.kind == "int4" else names[values.dtype]
    by_row = kind != "INT4" and rows == (1, values.shape[1])
    layer = low.add(
        "add_dequantize",
        low.quantized_constant(values, kind),
        low.constant(scale.flatten() if by_row else scale),
        low.dtype(node.kwargs["dtype"]),  # type: ignore[arg-type]
    )
    if by_row:
        layer.axis = 0
    elif kind != "INT4":  # whose builder asks for a GPU where blocks are told, and infers them
        layer.block_shape = low.trt.Dims(rows)
    return layer.get_output(0)


@converts(rank_graph.attention)
def attention(low: Lowering, node: fx.Node) -> Tensor:
    """The layer has no scale, so the query is scaled. Grouped heads stay grouped. It has one width
    for query, key and value: the narrower are filled up with zeros."""
    trt = low.trt
    query, key, value = (low[arg] for arg in node.args[:3])
    width, own = max(query.shape[3], value.shape[3]), int(value.shape[3])
    query, key, value = (_filled(low, tensor, width) for tensor in (query, key, value))
    more: Any = dict(zip(("mask", "lengths"), node.args[3:])) | dict(node.kwargs)
    dtype = node.meta["val"].dtype
    scale = low.scalar(more["scale"], dtype, 4)
    layer = low.add(
        "add_attention_v2",
        elementwise(low, query, scale, "PROD"),
        key,
        value,
        trt.AttentionNormalizationOp.SOFTMAX,
        getattr(trt.CausalMaskKind, more["causal"].upper()),
    )
    # where there is no fused kernel (fp32, small heads) the build would fail
    layer.decomposable = True
    if more.get("mask") is not None:
        if more["causal"] != rank_graph.NONE:
            raise low.error("has a mask and is causal, which exclude each other")
        layer.mask = low.with_rank(low[more["mask"]], 4)
    if more.get("lengths") is not None:
        layer.key_value_lengths = low.cast(low[more["lengths"]], torch.int32)
    out = layer.get_output(0)
    if own == width:
        return out
    sizes = [low.size(out, dim) for dim in range(3)]
    return low.slice(out, [0] * 4, [*sizes, own], [1] * 4)


def _filled(low: Lowering, tensor: Tensor, width: int) -> Tensor:
    """`tensor` with zeros behind its last dim."""
    if tensor.shape[3] == width:
        return tensor
    sizes = [*(low.size(tensor, dim) for dim in range(3)), width]
    return low.slice(tensor, [0] * 4, sizes, [1] * 4, fill=True)


@converts(rank_graph.update_cache)
def update_cache(low: Lowering, node: fx.Node) -> Tensor:
    """The result is the memory of the cache: the caller binds one address to both."""
    cache, update, start = (low[arg] for arg in node.args)
    return low.out("add_kv_cache_update", cache, update, start, low.trt.KVCacheMode.LINEAR)
