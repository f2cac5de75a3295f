"""write_masks: what a query sees as a mask of few operators, of whole sequences and of a cache.

before: a mask of the model's own; after, it is read no more, and the attention has

    window of 8 tokens, a whole sequence                with a cache of 64
    %0: i64[s] = arange(0, s)                           %0: i64[b,1,t,1] = past + arange(0, t)
    %1: i64[s,1] = unsqueeze(%0, 1)                     %1: i64[64] = constant 0, 1, ...
    %2: bool[s,s] = le(%0, %1)                          %2: bool[b,1,t,64] = le(%1, %0)
    %3: bool[s,s] = gt(%0, %1 - 8)                      %3: bool[b,1,t,64] = gt(%1, %0 - 8)
    %4: bool[s,s] = and(%2, %3)                         %4: bool[b,1,t,64] = and(%2, %3)

A bias of each key is looked up in nothing: the cache has its keys in the order of their positions.
One of each distance is looked up by the position of the query less that of the key.

expand_attention: attention that no layer of an engine has becomes products and a softmax.

    before                                              after
    %4: f32[b,8,s,16] = attention(%q, %k, %v, %m,       %0 = index_select(%k, 1, [0,0,0,0,1,1,1,1])
        scale=0.25, softcap=50.0)                       %1 = matmul(%q, transpose(%0, -1, -2))
                                                        ... tanh(%1 * 0.25 / 50) * 50 ...
                                                        %4 = matmul(softmax(where(...)), ...)

With sinks, each row's weights are divided by their sum and the sink's: softmax over one column
more, without joining it on. Scores are float32.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autoshard.export.rank_graph.attention_forms.masks import LearnedBias, Sight
from autoshard.export.rank_graph.graph import Constants, call_like
from autoshard.export.rank_graph.operators import NONE, attention, is_expanded
from autoshard.export.rank_graph.tidy import propagate
from autoshard.passes import Context, Pass, Report, replace
from autoshard.runtime.graph_meta import SIGHT

aten = torch.ops.aten


@dataclass(frozen=True)
class WriteMasks(Pass):
    """Masks of windows, and of attention that no layer has, where the model's own are more."""

    def rewrite(self, gm: fx.GraphModule, ctx: Context, report: Report) -> None:
        graph = gm.graph
        made: dict[int | None, fx.Node] = {}
        for node in graph.find_nodes(op="call_function", target=attention):
            sight: Sight | None = node.meta.get(SIGHT)
            if sight is None or not sight.causal or sight.biased:
                report.skip(node, "its mask has a bias, or is not known: the model's own stays")
                continue
            if sight.window is None and not is_expanded(node):
                continue
            if sight.window not in made:
                query: Any = node.args[0]
                with graph.inserting_before(node):
                    size = graph.call_function(aten.sym_size.int, (query, 2))
                    steps = _steps(graph, size)
                    rows = graph.call_function(aten.unsqueeze.default, (steps, 1))
                    made[sight.window] = _seen(graph, rows, steps, sight.window)
            node.args = (*node.args[:3], made[sight.window])
            node.kwargs = {**node.kwargs, "causal": NONE}
            report.hits += 1
        graph.eliminate_dead_code()
        propagate(graph)


class CachedMasks:
    """The masks of the attentions of a graph with a cache, one for those that see the same.

    lengths: how many tokens of each row are cached. size: the tokens of a call. max_length: those
    a cache holds.
    """

    def __init__(self, lengths: fx.Node, size: fx.Node, max_length: int) -> None:
        self.graph, self.max_length = lengths.graph, max_length
        self.lengths, self.size = lengths, size
        self.constants = Constants(self.graph, "mask")
        self._made: dict[Any, fx.Node] = {}
        self._positions: tuple[fx.Node, fx.Node] | None = None
        self._learned: dict[fx.Node, fx.Node] = {}

    def of(self, node: fx.Node, sight: Sight) -> fx.Node:
        """The mask of an attention, [batch, heads or 1, tokens, max_length]."""
        query: Any = node.args[0]
        dtype = torch.float32 if is_expanded(node) else query.meta["val"].dtype
        bias = (
            None if sight.bias is None else self.constants.node(sight.bias.to(dtype)[None, :, None])
        )
        with self.graph.inserting_before(node):
            table = self._table(sight.distances, dtype)
            key = (sight.window, bias, table, dtype)
            if key not in self._made:
                self._made[key] = self._mask(sight.window, bias, table, dtype)
        return self._made[key]

    def _table(
        self, distances: torch.Tensor | LearnedBias | None, dtype: torch.dtype
    ) -> fx.Node | None:
        """[distances, heads]."""
        if not isinstance(distances, LearnedBias):
            return None if distances is None else self.constants.node(distances.T.to(dtype))
        if distances.term not in self._learned:
            index = self.constants.node(distances.index)
            self._learned[distances.term] = distances.write(self.graph, index)
        return self._learned[distances.term]

    def _mask(
        self,
        window: int | None,
        bias: fx.Node | None,
        table: fx.Node | None,
        dtype: torch.dtype,
    ) -> fx.Node:
        call = self.graph.call_function
        if self._positions is None:
            rows = call(aten._to_copy.default, (self.lengths,), {"dtype": torch.int64})
            for dim in (1, 2, 3):
                rows = call(aten.unsqueeze.default, (rows, dim))
            steps = call(aten.unsqueeze.default, (_steps(self.graph, self.size), 1))
            rows = call(aten.add.Tensor, (rows, steps))
            self._positions = rows, self.constants.node(torch.arange(self.max_length))
        rows, columns = self._positions
        seen = _seen(self.graph, rows, columns, window)
        if table is not None:
            back = call(aten.sub.Tensor, (call(aten.squeeze.dim, (rows, 1)), columns))
            back = call(aten.clamp.default, (back, 0))
            found = call(aten.embedding.default, (table, back))  # [batch, tokens, keys, heads]
            found = call(aten.permute.default, (found, [0, 3, 1, 2]))
            found = call(aten._to_copy.default, (found,), {"dtype": dtype})
            bias = found if bias is None else call(aten.add.Tensor, (bias, found))
        if bias is None:
            return seen
        hidden = call(aten.full.default, ([1, 1, 1, 1], torch.finfo(dtype).min), {"dtype": dtype})
        return call(aten.where.self, (seen, bias, hidden))


def _steps(graph: fx.Graph, size: fx.Node) -> fx.Node:
    """0, 1, ... size - 1."""
    return graph.call_function(aten.arange.start_step, (0, size, 1), {"dtype": torch.int64})


def _seen(graph: fx.Graph, rows: fx.Node, columns: fx.Node, window: int | None) -> fx.Node:
    """Whether queries at the positions `rows` see the keys at the positions `columns`."""
    seen = graph.call_function(aten.le.Tensor, (columns, rows))
    if window is None:
        return seen
    first = graph.call_function(aten.sub.Tensor, (rows, window))
    near = graph.call_function(aten.gt.Tensor, (columns, first))
    return graph.call_function(aten.bitwise_and.Tensor, (seen, near))


@dataclass(frozen=True)
class ExpandAttention(Pass):
    """See the module's text. Indices of repeated heads are constants."""

    def rewrite(self, gm: fx.GraphModule, ctx: Context, report: Report) -> None:
        indices = Constants(gm.graph, "heads")
        for node in gm.graph.find_nodes(op="call_function", target=attention):
            if is_expanded(node):
                _expand(gm.graph, node, indices)
                report.hits += 1
        propagate(gm.graph)


def _expand(graph: fx.Graph, node: fx.Node, indices: Constants) -> None:
    query, key, value, mask, *_ = node.args
    heads: int = query.meta["val"].shape[1]  # type: ignore[union-attr]
    groups: int = key.meta["val"].shape[1]  # type: ignore[union-attr]
    call = functools.partial(call_like, node)
    with graph.inserting_before(node):
        if groups != heads:
            index = indices.node(torch.arange(groups).repeat_interleave(heads // groups))
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
        replace(node, call(aten.matmul.default, weights, value))


def _masked(call: Any, scores: fx.Node, mask: Any) -> fx.Node:
    """Scores of what may be seen; a mask of numbers is added."""
    if mask.meta["val"].dtype != torch.bool:
        return call(aten.add.Tensor, scores, mask)  # type: ignore[no-any-return]
    lowest = call(aten.full.default, [1, 1, 1, 1], torch.finfo(torch.float32).min,
                  dtype=torch.float32)  # fmt: skip
    return call(aten.where.self, mask, scores, lowest)  # type: ignore[no-any-return]
