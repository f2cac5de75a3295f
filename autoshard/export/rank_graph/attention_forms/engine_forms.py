"""plain_attention: every form of attention becomes `operators.attention`.

    before                                              after
    %m: bool[b,1,s,s] = ... arange, le, index ...       %4: f32[b,8,s,16] = attention(%q, %k, %v,
    %0: f32[b,2,1,s,16] = unsqueeze(%k, 2)                  causal="upper_left", scale=0.25)
    %1: f32[b,2,4,s,16] = expand(%0, [b,2,4,s,16])
    %2: f32[b,8,s,16] = reshape(%1, [b,8,s,16])
    ... the same for %v ...
    %4: f32[b,8,s,16] = scaled_dot_product_attention(%q, %2, %3, %m, scale=0.25)

- A mask that is computed from sizes alone and is the causal one becomes the causal flag; that of a
  sliding window, and the causal one beside a bias of each key, are told from their values too
  (masks.py).
- Repeated key and value heads become the heads they repeat.

Not done: a mask that depends on an input, and any other mask, stays a mask.

write_masks: what a query sees as a mask of few operators, of whole sequences and of a cache.

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

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autoshard.export.errors import export_error
from autoshard.export.rank_graph.attention_forms.masks import LearnedBias, Sight, read_mask
from autoshard.export.rank_graph.graph import Constants, call_like, valued_call
from autoshard.export.rank_graph.operators import NONE, UPPER_LEFT, attention, is_expanded
from autoshard.export.rank_graph.tidy import propagate
from autoshard.passes import Context, Pass, Report, replace, unrepeated
from autoshard.planning import arguments
from autoshard.runtime.graph_meta import SIGHT

aten = torch.ops.aten


@dataclass(frozen=True)
class PlainAttention(Pass):
    """See the module's text. sizes: the name of each symbol; longest: the largest size of each
    name."""

    sizes: Mapping[str, str]
    longest: Mapping[str, int]

    def rewrite(self, gm: fx.GraphModule, ctx: Context, report: Report) -> None:
        """Rewrite `gm.graph` in place. Raises ExportError for dropout, and for attention that is
        not of [batch, heads, tokens, head_dim]."""
        graph = gm.graph
        for node in graph.find_nodes(
            op="call_function", target=aten.scaled_dot_product_attention.default
        ):
            _replace(graph, node)
        read: dict[fx.Node, Sight | None] = {}
        for node in graph.find_nodes(op="call_function", target=attention):
            with graph.inserting_before(node):
                given: Any = node.args
                query, key, value, mask, *_ = given
                heads = _unrepeated(key), _unrepeated(value)
                if heads[0].meta["val"].shape[1] == heads[1].meta["val"].shape[1]:
                    key, value = heads
            sight = Sight(causal=True) if node.kwargs["causal"] == UPPER_LEFT else None
            if sight is None and mask is not None:
                if mask not in read:
                    read[mask] = read_mask(mask, self.sizes, self.longest)
                sight = read[mask]
            if sight is not None and sight.biased and node.kwargs.get("sinks") is not None:
                sight = None  # a bias of whole rows, which is not kept, counts beside a sink
            if sight is not None:
                node.meta[SIGHT] = sight
                flagged = UPPER_LEFT if sight.causal and sight.plain else NONE
                node.kwargs = {**node.kwargs, "causal": flagged}
                mask = None if sight.plain else mask
            elif mask is not None:
                report.skip(node, "its mask depends on an input, or is of no form that is known")
            node.args = (query, key, value, mask)
            report.hits += 1
        graph.eliminate_dead_code()


def _replace(graph: fx.Graph, node: fx.Node) -> None:
    """scaled_dot_product_attention by `operators.attention`."""
    given = arguments(node)
    query, key, value = (given[name] for name in ("query", "key", "value"))
    if given["dropout_p"]:
        raise export_error(f"attention drops out with probability {given['dropout_p']}", node)
    shapes = [n.meta["val"].shape for n in (query, key, value)]
    if any(len(shape) != 4 for shape in shapes):
        raise export_error(
            f"attention of {len(shapes[0])} dims; engines have it of "
            "[batch, heads, tokens, head_dim]",
            node,
        )
    scale = 1 / math.sqrt(shapes[0][-1]) if given["scale"] is None else given["scale"]
    causal, mask = (UPPER_LEFT, None) if given["is_causal"] else (NONE, given["attn_mask"])
    with graph.inserting_before(node):
        new = call_like(node, attention, query, key, value, mask, causal=causal, scale=float(scale))
    new.meta["val"] = node.meta["val"]
    replace(node, new)


def _unrepeated(node: Any) -> Any:
    """The heads that `node`, [b, g * r, s, d], repeats r times each; `node` where it does not."""
    if node.target is aten.slice.Tensor and node.args[1] == 1:
        return _part(node)
    found = unrepeated(node)
    return node if found is None else found


def _part(node: fx.Node) -> fx.Node:
    """Some of the repeated heads, for a rank that shares key heads with others."""
    whole: Any = node.args[0]
    source = _unrepeated(whole)
    if source is whole:
        return node
    start: Any = node.args[2]
    end: Any = node.args[3]
    heads = whole.meta["val"].shape[1]
    end = min(end, heads)
    repeats = heads // source.meta["val"].shape[1]
    first, last = start // repeats, (end - 1) // repeats
    whole_heads = start % repeats == 0 and end % repeats == 0
    if not whole_heads and first != last:
        return node
    return valued_call(node, aten.slice.Tensor, source, 1, first, last + 1)


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
                self._made[key] = self._mask(*key)
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
        if mask is not None and mask.meta["val"].dtype != torch.bool:  # type: ignore[union-attr]
            scores = call(aten.add.Tensor, scores, mask)
        elif mask is not None:
            lowest = torch.finfo(torch.float32).min
            hidden = call(aten.full.default, [1, 1, 1, 1], lowest, dtype=torch.float32)
            scores = call(aten.where.self, mask, scores, hidden)
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
