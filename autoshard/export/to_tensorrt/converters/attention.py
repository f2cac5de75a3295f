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
    """The layer has no scale, so the query is scaled. Grouped heads stay grouped."""
    trt = low.trt
    query, key, value = (low[arg] for arg in node.args[:3])
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
    return layer.get_output(0)


@converts(rank_graph.update_cache)
def update_cache(low: Lowering, node: fx.Node) -> Tensor:
    """The result is the memory of the cache: the caller binds one address to both."""
    cache, update, start = (low[arg] for arg in node.args)
    return low.out("add_kv_cache_update", cache, update, start, low.trt.KVCacheMode.LINEAR)
