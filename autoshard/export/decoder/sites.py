"""Where a graph attends: in one operator, or written out as products around a softmax."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from autoshard.export.decoder.parameter_uses import parameter_of
from autoshard.export.decoder.probing import evaluate, sources
from autoshard.export.serial_graph import ModelGraph

aten = torch.ops.aten

ATTENTION = aten.scaled_dot_product_attention.default
_SOFTMAXES = (aten.softmax.int, aten._softmax.default)
_PRODUCTS = (aten.matmul.default, aten.bmm.default)


@dataclass(frozen=True)
class AttentionSite:
    """The operands of one attention, and the node of its result, (.., heads, tokens, head_dim).

    turned: keys have their last dims swapped. product, softmax: the nodes of a written-out one.
    """

    node: fx.Node
    query: fx.Node
    key: fx.Node
    value: fx.Node
    turned: bool = False
    product: fx.Node | None = None
    softmax: fx.Node | None = None

    def scores(self, graph: ModelGraph, product: float) -> Tensor:
        """What goes into the softmax, [.., tokens, tokens], where every query times every key is
        `product`. -inf, or about it, where a token may not look."""
        if self.product is None or self.softmax is None:
            return self._scores_of_operator(graph, product)
        shape = self.product.meta["val"].shape
        values = torch.full(shape, product, dtype=torch.float64)
        if self.product.target is aten.baddbmm.default:
            given = self.product.kwargs
            added = evaluate(graph, self.product.args[0], {})  # type: ignore[arg-type]
            alpha, beta = (float(given.get(name, 1)) for name in ("alpha", "beta"))  # type: ignore[arg-type]
            values = alpha * values + beta * added
        return evaluate(graph, self.softmax.args[0], {self.product: values})  # type: ignore[arg-type]

    def _scores_of_operator(self, graph: ModelGraph, product: float) -> Tensor:
        given = _arguments(self.node)
        length, head_dim = self.query.meta["val"].shape[-2:]
        scale = given.get("scale")
        scores = torch.full((length, length), product, dtype=torch.float64)
        scores *= head_dim**-0.5 if scale is None else scale
        if given.get("is_causal"):
            later = torch.ones(length, length, dtype=torch.bool).triu(1)
            scores = scores.masked_fill(later, -torch.inf)
        mask = given.get("attn_mask")
        if mask is None:
            return scores
        bias = evaluate(graph, mask, {})
        if bias.dtype == torch.bool:
            bias = torch.zeros(bias.shape, dtype=torch.float64).masked_fill(~bias, -torch.inf)
        return scores + bias


def attention_at(
    graph: ModelGraph, node: fx.Node, anchors: Mapping[fx.Node, Any]
) -> AttentionSite | None:
    """The attention whose result is `node`, or None. anchors: those before it."""
    if node.target is ATTENTION:
        given = _arguments(node)
        return AttentionSite(node, given["query"], given["key"], given["value"])
    if node.target not in _PRODUCTS or any(parameter_of(graph, one) for one in node.args):
        return None
    weights, value = node.args[:2]
    softmaxes = {n: None for n in graph.nodes if n.target in _SOFTMAXES}
    read = sources(weights, {**anchors, **softmaxes})  # type: ignore[arg-type]
    if len(read) != 1 or read[0] not in softmaxes or not isinstance(value, fx.Node):
        return None
    products = {
        n: None
        for n in graph.nodes
        if n.target in (*_PRODUCTS, aten.baddbmm.default) and n not in anchors
    }
    scores = sources(read[0].args[0], {**anchors, **products})  # type: ignore[arg-type]
    if len(scores) != 1 or scores[0] not in products or not _passes(graph, weights, read[0]):
        return None
    (product,) = scores
    query, key = product.args[-2:]
    assert isinstance(query, fx.Node) and isinstance(key, fx.Node)
    return AttentionSite(node, query, key, value, True, product, read[0])


def _arguments(node: fx.Node) -> dict[str, Any]:
    schema = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    return {**dict(zip(schema, node.args)), **node.kwargs}


def _passes(graph: ModelGraph, node: Any, softmax: fx.Node) -> bool:
    """Whether `node` is the result of the softmax, reshaped or cast at most."""
    values = torch.rand(softmax.meta["val"].shape, dtype=torch.float64)
    return torch.equal(evaluate(graph, node, {softmax: values}).flatten(), values.flatten())
