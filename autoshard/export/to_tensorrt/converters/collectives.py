"""Collectives as native layers of the engine, over the one process group it has."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autoshard.export.to_tensorrt.converters.network import Lowering, Tensor, converts
from autoshard.runtime import compat

_c10d = torch.ops._c10d_functional


def _collective(low: Lowering, node: fx.Node, operation: str, reduction: str) -> Tensor:
    """An engine has one communicator whatever `groups` says, so there must be one group, and the
    number of ranks must be said: an all-reduce of 1 rank builds and does nothing."""
    axis = low.graph.axis
    if node.args[-1] != axis.group:
        raise low.error(
            f"communicates in the group {node.args[-1]}; an engine has one group, {axis.group}"
        )
    layer = low.add(
        "add_dist_collective",
        low[node.args[0]],
        getattr(low.trt.CollectiveOperation, operation),
        getattr(low.trt.ReduceOperation, reduction),
        -1,
        None,
    )
    layer.num_ranks = axis.size
    return layer.get_output(0)


def _sum_only(low: Lowering, node: fx.Node) -> None:
    if node.args[1] != "sum":
        raise low.error(f"reduces by {node.args[1]!r}; a rank graph reduces by sum")


def _divisible(low: Lowering, node: fx.Node) -> None:
    source: Any = node.args[0]
    rows, n = source.meta["val"].shape[0], low.graph.axis.size
    if not isinstance(rows, int) and compat.size_expression(rows) % n == 0:
        return  # the ranks' parts in front of a dynamic size: n * batch
    if not isinstance(rows, int):
        raise low.error(
            f"splits a dim of dynamic size among {n} ranks",
            "Shard it otherwise, or give a static batch and sequence.",
        )
    if rows % n:
        raise low.error(f"splits {rows} rows among {n} ranks: {rows} % {n} != 0")


@converts(_c10d.all_reduce.default)
def all_reduce(low: Lowering, node: fx.Node) -> Tensor:
    """The sum over ranks, on every rank."""
    _sum_only(low, node)
    return _collective(low, node, "ALL_REDUCE", "SUM")


@converts(_c10d.all_gather_into_tensor.default)
def all_gather(low: Lowering, node: fx.Node) -> Tensor:
    """The ranks' tensors along dim 0."""
    if node.args[1] != low.graph.axis.size:
        raise low.error(f"gathers from {node.args[1]} ranks of {low.graph.axis.size}")
    return _collective(low, node, "ALL_GATHER", "NONE")


@converts(_c10d.reduce_scatter_tensor.default)
def reduce_scatter(low: Lowering, node: fx.Node) -> Tensor:
    """This rank's part, of dim 0, of the sum over ranks."""
    _sum_only(low, node)
    _divisible(low, node)
    return _collective(low, node, "REDUCE_SCATTER", "SUM")


@converts(_c10d.all_to_all_single.default)
def all_to_all(low: Lowering, node: fx.Node) -> Tensor:
    """Equal blocks of dim 0 to each rank."""
    _divisible(low, node)
    sizes = {str(size) for sizes in node.args[1:3] for size in sizes}  # type: ignore[union-attr]
    if len(sizes) != 1:
        raise low.error(f"sends blocks of different sizes: {sorted(sizes)}")
    return _collective(low, node, "ALL_TO_ALL", "NONE")
