"""Values of a graph that are a parameter, whatever swaps, casts and copies are between."""

from __future__ import annotations

import torch
from torch import fx

from autoshard.export.serial_graph import ModelGraph

aten = torch.ops.aten

SWAPS = (aten.permute.default, aten.transpose.int, aten.t.default, aten.numpy_T.default)
MOVES = (aten._to_copy.default, aten.detach.default, aten.alias.default, aten.clone.default)


def parameter_of(graph: ModelGraph, node: object) -> tuple[fx.Node, bool] | None:
    """(placeholder, whether its last two dims are swapped) of a value that is a parameter."""
    swapped = False
    while isinstance(node, fx.Node):
        if node in graph.parameters:
            return node, swapped
        if node.target in SWAPS:
            val = node.meta["val"]
            order = list(range(val.dim()))
            order[-2:] = order[:-3:-1]
            if val.dim() < 2 or not _swaps_last(node, order):
                return None
            swapped = not swapped
        elif node.target not in MOVES:
            return None
        node = node.args[0]
    return None


def _swaps_last(node: fx.Node, order: list[int]) -> bool:
    ndim = len(order)
    if node.target is aten.permute.default:
        return [d % ndim for d in node.args[1]] == order  # type: ignore[union-attr,operator]
    if node.target is aten.transpose.int:
        return {d % ndim for d in node.args[1:3]} == {ndim - 1, ndim - 2}  # type: ignore[operator]
    return ndim == 2


def moved(node: object) -> object:
    """The value behind casts and copies."""
    while isinstance(node, fx.Node) and node.target in MOVES:
        node = node.args[0]
    return node
