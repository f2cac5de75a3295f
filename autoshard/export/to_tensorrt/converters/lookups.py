"""Lookups by index."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autoshard.export.to_tensorrt.converters.network import Lowering, Tensor, converts
from autoshard.export.to_tensorrt.converters.pointwise import elementwise

aten = torch.ops.aten


@converts(aten.embedding.default)
def embedding(low: Lowering, node: fx.Node) -> Tensor:
    """Rows of a table."""
    return low.out("add_gather", low[node.args[0]], low[node.args[1]], 0)


@converts(aten.index_select.default)
def index_select(low: Lowering, node: fx.Node) -> Tensor:
    """Entries of one dim."""
    x, dim = low[node.args[0]], node.args[1]
    return low.out("add_gather", x, low[node.args[2]], dim % len(x.shape))  # type: ignore[operator]


@converts(aten.gather.default)
def gather(low: Lowering, node: fx.Node) -> Tensor:
    """For each entry of an index, the entry of one dim at that number."""
    x, dim, where = low[node.args[0]], node.args[1], low[node.args[2]]
    layer = low.add("add_gather_v2", x, where, low.trt.GatherMode.ELEMENT)
    layer.axis = dim % len(x.shape)  # type: ignore[operator]
    return layer.get_output(0)


@converts(aten.scatter.src)
def scatter(low: Lowering, node: fx.Node) -> Tensor:
    """A tensor with values written at an index of one dim."""
    index, source = (arg.meta["val"].shape for arg in node.args[2:4])  # type: ignore[union-attr]
    if str(index) != str(source):
        raise low.error(f"writes {tuple(source)} at an index of {tuple(index)}: a part of it")
    x, dim, where, values = (low[arg] for arg in node.args)
    layer = low.add("add_scatter", x, where, values, low.trt.ScatterMode.ELEMENT)
    layer.axis = dim % len(x.shape)
    return layer.get_output(0)


@converts(aten.index.Tensor)
def index(low: Lowering, node: fx.Node) -> Tensor:
    """Entries of one dim by an index of any shape."""
    indices: Any = node.args[1]
    given = [(dim, i) for dim, i in enumerate(indices) if i is not None]
    if len(given) != 1 or given[0][1].meta["val"].dtype == torch.bool:
        raise low.error(
            f"looks up by {len(given)} indices; engines look up by one index of whole numbers"
        )
    dim, where = given[0]
    x, val = low[node.args[0]], where.meta["val"]
    return low.out("add_gather", x, _from_the_end(low, x, dim, low[where], val), dim)


def _from_the_end(low: Lowering, x: Tensor, dim: int, where: Tensor, val: torch.Tensor) -> Tensor:
    """An index, what is below 0 counted from the end: engines count from the start only."""
    rank = val.dim()
    size = low.cast(low.sizes([low.size(x, dim)]), val.dtype)
    if rank == 0:
        size = low.out("add_squeeze", size, low.constant(torch.zeros(1, dtype=torch.int64)))
    below = elementwise(low, where, low.scalar(0, val.dtype, rank), "LESS")
    moved = elementwise(low, where, low.with_rank(size, rank), "SUM")
    return low.out("add_select", below, moved, where)
