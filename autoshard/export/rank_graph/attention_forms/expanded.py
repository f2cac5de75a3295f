"""expand_attention: attention that no layer of an engine has becomes products and a softmax.

    before                                              after
    %4: f32[b,8,s,16] = attention(%q, %k, %v, %m,       %0 = index_select(%k, 1, [0,0,0,0,1,1,1,1])
        scale=0.25, softcap=50.0)                       %1 = matmul(%q, transpose(%0, -1, -2))
                                                        ... tanh(%1 * 0.25 / 50) * 50 ...
                                                        %4 = matmul(softmax(where(...)), ...)

With sinks, each row's weights are divided by their sum and the sink's: softmax over one column
more, without joining it on. Scores are float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autoshard.export.rank_graph.operators import attention, is_expanded

aten = torch.ops.aten


def expand_attention(gm: fx.GraphModule, constants: dict[str, torch.Tensor]) -> None:
    """Rewrite `gm.graph` in place; indices of repeated heads are added to `constants`. Every node
    has its value; new ones have none."""
    graph = gm.graph
    indices: dict[tuple[int, int], fx.Node] = {}
    for node in graph.find_nodes(op="call_function", target=attention):
        if is_expanded(node):
            _expand(graph, node, constants, indices)


def _expand(
    graph: fx.Graph,
    node: fx.Node,
    constants: dict[str, torch.Tensor],
    indices: dict[tuple[int, int], fx.Node],
) -> None:
    query, key, value, mask, *_ = node.args
    heads: int = query.meta["val"].shape[1]  # type: ignore[union-attr]
    groups: int = key.meta["val"].shape[1]  # type: ignore[union-attr]
    where = {k: v for k, v in node.meta.items() if k != "val"}
    if groups != heads and (heads, groups) not in indices:
        name = f"heads_{len(indices)}"
        constants[name] = torch.arange(groups).repeat_interleave(heads // groups)
        last = graph.find_nodes(op="placeholder")[-1]
        with graph.inserting_after(last):
            made = indices[heads, groups] = graph.placeholder(name)
        with query.meta["val"].fake_mode:  # type: ignore[union-attr]
            made.meta["val"] = torch.empty(heads, dtype=torch.int64)

    def call(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        new = graph.call_function(target, args, kwargs)
        new.meta = dict(where)
        return new

    with graph.inserting_before(node):
        if groups != heads:
            index = indices[heads, groups]
            key, value = (call(aten.index_select.default, x, 1, index) for x in (key, value))
        scores = call(aten.matmul.default, query, call(aten.transpose.int, key, -1, -2))
        scores = call(aten._to_copy.default, scores, dtype=torch.float32)
        scores = call(aten.mul.Tensor, scores, node.kwargs["scale"])
        if node.kwargs.get("softcap"):
            cap = node.kwargs["softcap"]
            capped = call(aten.tanh.default, call(aten.div.Tensor, scores, cap))
            scores = call(aten.mul.Tensor, capped, cap)
        if mask is not None:
            scores = _masked(call, scores, mask)
        sinks = node.kwargs.get("sinks")
        if sinks is None:
            weights = call(aten.softmax.int, scores, -1)
        else:
            sinks = call(aten._to_copy.default, sinks, dtype=torch.float32)
            top = call(aten.maximum.default, call(aten.amax.default, scores, [-1], True), sinks)
            raised = call(aten.exp.default, call(aten.sub.Tensor, scores, top))
            total = call(aten.sum.dim_IntList, raised, [-1], True)
            sink = call(aten.exp.default, call(aten.sub.Tensor, sinks, top))
            weights = call(aten.div.Tensor, raised, call(aten.add.Tensor, total, sink))
        dtype = query.meta["val"].dtype  # type: ignore[union-attr]
        weights = call(aten._to_copy.default, weights, dtype=dtype)
        made = call(aten.matmul.default, weights, value)
    node.replace_all_uses_with(made)
    graph.erase_node(node)


def _masked(call: Any, scores: fx.Node, mask: Any) -> fx.Node:
    """Scores of what may be seen; a mask of numbers is added."""
    if mask.meta["val"].dtype != torch.bool:
        return call(aten.add.Tensor, scores, mask)  # type: ignore[no-any-return]
    lowest = call(aten.full.default, [1, 1, 1, 1], torch.finfo(torch.float32).min,
                  dtype=torch.float32)  # fmt: skip
    return call(aten.where.self, mask, scores, lowest)  # type: ignore[no-any-return]
