"""with_quantized_weights: weights that a rank holds as numbers of 8 or 4 bits and their scales.

    before                                  after
    %w: f16[256,512]                        %w: i8[256,512]      %w_scale: f16[256,1]
    %1: f16[b,s,256] = linear(%x, %w)       %0: f16[256,512] = dequantize(%w, %w_scale, [1, 512])
                                            %1: f16[b,s,256] = linear(%x, %0)

Experts, [experts, rows, columns], are the rows of all of them, and what is dequantized is reshaped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import fx

from autoshard.export.quantization import BlockScaled, block_scaled
from autoshard.export.rank_graph.graph import QuantizedForm, RankGraph, RankWeight
from autoshard.export.rank_graph.operators import dequantize
from autoshard.runtime.collectives import Axis, chunk_bounds, shard_dim

aten = torch.ops.aten


def with_quantized_weights(graph: RankGraph, kind: str, rows: Mapping[str, int]) -> RankGraph:
    """A rank graph whose weights of the names in `rows` are quantized to the layout `kind`.

    rows: of each published matrix of a weight.
    """
    weights = dict(graph.weights)
    for target, weight in graph.weights.items():
        if weight.name in rows:
            form = QuantizedForm(kind, rows[weight.name], f"{target}_scale")
            weights[target] = replace(weight, quantized=form)
    made = replace(graph, weights=weights)
    for module in (graph.module, graph.whole):
        if module is not None:
            _rewrite(module, made)
    if graph.encoder is not None:
        made = replace(made, encoder=with_quantized_weights(graph.encoder, kind, rows))
    return made


def quantized_part(weight: RankWeight, axis: Axis, whole: torch.Tensor) -> BlockScaled:
    """What a rank holds of a quantized weight, as a matrix. whole: of the weight's shape, in its
    dtype; without memory, for what it will be."""
    assert weight.quantized is not None
    made = block_scaled(weight.quantized.kind, whole, weight.quantized.rows)
    dim = shard_dim(weight.state)
    if dim is not None:
        made = made.part(dim, *chunk_bounds(whole.shape[dim], axis))
    return made.matrix


def _rewrite(module: fx.GraphModule, made: RankGraph) -> None:
    graph = module.graph
    for node in graph.find_nodes(op="placeholder"):
        weight = made.weights.get(str(node.target))
        if weight is None or weight.quantized is None or not node.users:
            continue
        val = node.meta["val"]
        whole = torch.empty(weight.shape, dtype=weight.dtype, device="meta")
        part = quantized_part(weight, made.axis, whole)
        with graph.inserting_after(node):
            scale = graph.placeholder(weight.quantized.scale)
        with graph.inserting_before(next(n for n in graph.nodes if n.op != "placeholder")):
            result = new = graph.call_function(
                dequantize, (node, scale, list(part.block)), {"dtype": weight.dtype}
            )
            if val.dim() > 2:
                result = graph.call_function(aten.reshape.default, (new, list(val.shape)))
        node.replace_all_uses_with(result, delete_user_cb=lambda user, new=new: user is not new)
        with val.fake_mode:
            node.meta["val"] = torch.empty(part.values.shape, dtype=part.values.dtype)
            scale.meta["val"] = torch.empty(part.scale.shape, dtype=part.scale.dtype)
            new.meta["val"] = torch.empty(part.values.shape, dtype=weight.dtype)
        result.meta["val"] = new.meta["val"] if result is new else val
        for one in (new, result):
            one.meta.update({k: v for k, v in node.meta.items() if k != "val"})
    module.recompile()
