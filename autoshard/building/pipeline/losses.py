"""Mean losses as sums over the whole batch's tokens, so that micro-batches add up to them.

    before                                     after
    %0: f32[] = cross_entropy_loss(%x, %t)     %0: f32[] = cross_entropy_loss(%x, %t, reduction=2)
                                               %1: f32[] = own_tokens(%t, None, -100, ())
                                               %2: f32[] = div(%0, %1)

The count is of the whole batch, made of the labels alone: each micro-batch divides its sum by it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from autoshard.passes import emit
from autoshard.planning import LOSSES, packet, value
from autoshard.runtime.collectives import Axis
from autoshard.runtime.operators import own_tokens

aten = torch.ops.aten
_MEAN, _SUM = 1, 2  # at::Reduction

_NAMES = ("self", "target", "weight", "reduction", "ignore_index", "label_smoothing")
_DEFAULTS: dict[str, Any] = {"weight": None, "reduction": _MEAN, "ignore_index": -100}
_NAME = "token_means"


def sum_over_tokens(gm: fx.GraphModule, ranks: Sequence[Axis] = ()) -> int:
    """Rewrite the mean losses over classes in a serial graph, in place. Returns how many.

    ranks: data-parallel axes. With them the count is of the tokens of all ranks, divided by their
    number: gradients are averaged over the ranks, and their mean is that over every token.
    """
    found = 0
    for node in list(gm.graph.nodes):
        if packet(node) not in LOSSES:
            continue
        given = {**_DEFAULTS, **dict(zip(_NAMES, node.args)), **node.kwargs}
        if given["reduction"] != _MEAN or value(given["target"]).is_floating_point():
            continue
        _rewrite(gm.graph, node, given, tuple(ranks))
        found += 1
    return found


def without_broadcasts(gm: fx.GraphModule) -> None:
    """Replace the lists of broadcast tensors in a serial graph (of `mse_loss`) by their entries."""
    for node in gm.graph.find_nodes(op="call_function", target=aten.broadcast_tensors.default):
        for item in list(node.users):
            source = node.args[0][item.args[1]]
            if value(source).shape != value(item).shape:
                with gm.graph.inserting_before(item):
                    shape = list(value(item).shape)
                    source = emit(
                        gm.graph, item, aten.expand.default, (source, shape), provenance=_NAME
                    )
            item.replace_all_uses_with(source)
            gm.graph.erase_node(item)
        gm.graph.erase_node(node)


def _rewrite(
    graph: fx.Graph, node: fx.Node, given: dict[str, Any], ranks: tuple[Axis, ...]
) -> None:
    arguments = (given["target"], given["weight"], given["ignore_index"], ranks)
    summed = {name: given[name] for name in _NAMES[2:] if name in given}
    with graph.inserting_before(node):
        total = emit(
            graph,
            node,
            node.target,  # type: ignore[arg-type]
            (given["self"], given["target"]),
            {**summed, "reduction": _SUM},
            provenance=_NAME,
            value=node,
        )
        count = emit(graph, node, own_tokens, arguments, provenance=_NAME, value="unknown")
        count.meta["val"] = value(node).detach().new_empty((), dtype=torch.float32)
        if ranks:
            batches = math.prod(axis.size for axis in ranks)
            count = emit(graph, node, aten.div.Scalar, (count, batches), provenance=_NAME)
        dtype = value(node).dtype
        count = emit(
            graph, node, aten._to_copy.default, (count,), {"dtype": dtype}, provenance=_NAME
        )
        mean = emit(graph, node, aten.div.Tensor, (total, count), provenance=_NAME)
    node.replace_all_uses_with(mean)
    graph.erase_node(node)
