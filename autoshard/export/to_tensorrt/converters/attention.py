"""Attention and the key-value cache, one layer each."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autoshard.export import rank_graph
from autoshard.export.to_tensorrt.converters.network import Lowering, Tensor, converts
from autoshard.export.to_tensorrt.converters.pointwise import elementwise


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
