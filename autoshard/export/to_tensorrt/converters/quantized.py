"""Weights that the engine holds in 8 or 4 bits."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autoshard.export import rank_graph
from autoshard.export.to_tensorrt.converters.network import Lowering, Tensor, converts


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
