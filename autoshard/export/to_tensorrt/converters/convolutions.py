"""Convolutions and pools, over one, two or three dims."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autoshard.export.to_tensorrt.converters.network import Lowering, Tensor, converts

aten = torch.ops.aten


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
    names = ("stride", "padding", "dilation", "ceil_mode")
    given: dict[str, Any] = dict(zip(names, node.args[2:])) | dict(node.kwargs)
    window: Any = node.args[1]
    if given.get("ceil_mode") or set(given.get("dilation") or (1,)) != {1}:
        raise low.error("pools with ceil_mode or dilation; engines pool without")
    if any(user.args[1] != 0 for user in node.users):
        raise low.error("says where the largest of a window was; engines say what it is")
    layer = low.add("add_pooling_nd", low[node.args[0]], low.trt.PoolingType.MAX, tuple(window))
    layer.stride_nd = tuple(given.get("stride") or window)
    layer.padding_nd = tuple(given.get("padding") or (0, 0))
    return layer.get_output(0), None
