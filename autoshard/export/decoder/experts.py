"""Mixtures of experts in a decoder's graph: stacks of matrices and the router that chooses."""

from __future__ import annotations

import operator
from dataclasses import replace

import torch
from torch import Tensor, fx

from autoshard.export.decoder.anchors import Anchors
from autoshard.export.decoder.probing import evaluate, gated_activation, sources
from autoshard.export.decoder.structure import Mlp
from autoshard.export.errors import export_error
from autoshard.export.serial_graph import ModelGraph

aten = torch.ops.aten


def read_experts(graph: ModelGraph, found: Anchors, role: dict[fx.Node, str]) -> list[Mlp]:
    """The mixtures of experts, in order; their projections get a role. Empty where there are none.

    Each is two stacks of matrices: gate and up of all experts in one, and down in the other.
    Raises ExportError where the weights of the chosen experts do not sum to 1, or another form.
    """
    stacks = [node for node in found.linear if _depth(graph, found, node) == 3]
    anchors = found.all()
    routers = [node for node in graph.nodes if node.target is aten.topk.default]
    if not stacks:
        return []
    mlps = []
    downs = [node for node in stacks if any(n in stacks for n in _feeds(found, node, anchors))]
    if len(downs) * 2 != len(stacks) or len(downs) != len(routers):
        raise export_error(
            f"{len(stacks)} stacks of expert matrices, {len(downs)} of them down-projections, and "
            f"{len(routers)} routers; a layer has 2, 1 and 1",
            stacks[0],
        )
    for down, topk in zip(downs, routers):
        (first,) = [n for n in _feeds(found, down, anchors) if n in stacks]
        (router,) = [n for n in sources(topk.args[0], anchors) if n in found.linear]  # type: ignore[arg-type]
        _renormalises(topk)
        role.update({down: "down", first: "up", router: "router"})
        mlps.append(_mlp(graph, found, first, down, router, int(topk.args[1])))  # type: ignore[arg-type]
    return mlps


def _mlp(
    graph: ModelGraph, found: Anchors, first: fx.Node, down: fx.Node, router: fx.Node, top_k: int
) -> Mlp:
    both, width = found.linear[first], found.linear[down].inputs
    if both.outputs != 2 * width:
        raise export_error(
            f"{both.outputs} outputs are not gate and up of a down-projection of {width} inputs",
            first,
        )
    low, high = torch.arange(width), torch.arange(width, 2 * width)
    x = found.inputs[down]

    def between(a: Tensor, b: Tensor) -> Tensor:
        pieces = []
        for start in range(0, len(a), width):
            part = a[start : start + width], b[start : start + width]
            full = torch.zeros(first.meta["val"].shape, dtype=torch.float64)
            full[..., : len(part[0])] = part[0]
            full[..., width : width + len(part[1])] = part[1]
            pieces.append(evaluate(graph, x, {first: full})[0, : len(part[0])])
        return torch.cat(pieces)

    gated = gated_activation(between)
    if gated is None:
        raise export_error("the experts are not act(gate) * up with gate and up in halves", down)
    name, index = gated
    gate, up = (low, high) if index == 0 else (high, low)
    linear = found.linear[router]
    return Mlp(
        up=replace(both, rows=up),
        gate=replace(both, rows=gate),
        down=found.linear[down],
        activation=name,
        router=linear,
        experts=linear.outputs,
        top_k=top_k,
    )


def _renormalises(topk: fx.Node) -> None:
    """The weights of the chosen experts must sum to 1: divided by their sum, or a softmax."""
    todo = [user for user in topk.users if user.args[1:] == (0,)]
    seen: set[fx.Node] = set()
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.target in (aten.div.Tensor, aten.div_.Tensor):
            divisor = node.args[1]
            if isinstance(divisor, fx.Node) and divisor.target is aten.sum.dim_IntList:
                return
        if node.target in (aten.softmax.int, aten._softmax.default):
            return
        if node.target in (operator.getitem, aten._to_copy.default, aten.reshape.default):
            todo += node.users
    raise export_error("the weights of the chosen experts do not sum to 1", topk)


def _feeds(found: Anchors, node: fx.Node, anchors: object) -> list[fx.Node]:
    return sources(found.inputs[node], anchors)  # type: ignore[arg-type]


def _depth(graph: ModelGraph, found: Anchors, node: fx.Node) -> int:
    name = found.linear[node].weight
    (placeholder,) = [p for p, n in graph.parameters.items() if n == name]
    return placeholder.meta["val"].dim()  # type: ignore[no-any-return]
