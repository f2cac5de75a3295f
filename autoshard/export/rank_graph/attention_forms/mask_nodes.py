"""What a query sees as a mask of few operators, of whole sequences and of a cache.

    window of 8 tokens, a whole sequence                with a cache of 64
    %0: i64[s] = arange(0, s)                           %0: i64[b,1,t,1] = past + arange(0, t)
    %1: i64[s,1] = unsqueeze(%0, 1)                     %1: i64[64] = constant 0, 1, ...
    %2: bool[s,s] = le(%0, %1)                          %2: bool[b,1,t,64] = le(%1, %0)
    %3: bool[s,s] = gt(%0, %1 - 8)                      %3: bool[b,1,t,64] = gt(%1, %0 - 8)
    %4: bool[s,s] = and(%2, %3)                         %4: bool[b,1,t,64] = and(%2, %3)

A bias of each key is looked up in nothing: the cache has its keys in the order of their positions.
One of each distance is looked up by the position of the query less that of the key.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from autoshard.export.rank_graph.attention_forms.distances import LearnedBias
from autoshard.export.rank_graph.attention_forms.masks import Sight
from autoshard.export.rank_graph.operators import NONE, is_expanded

aten = torch.ops.aten


def write_masks(graph: fx.Graph, sights: Mapping[fx.Node, Sight]) -> None:
    """Masks of windows, and of attention that no layer has, where the model's own are more."""
    made: dict[int | None, fx.Node] = {}
    for node, sight in sights.items():
        if not sight.causal or sight.biased:
            continue  # the model's own mask stays
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
    graph.eliminate_dead_code()


class CachedMasks:
    """The masks of the attentions of a graph with a cache, one for those that see the same.

    constants: by placeholder; positions and biases are added. lengths: how many tokens of each row
    are cached. size: the tokens of a call. max_length: those a cache holds.
    """

    def __init__(
        self,
        graph: fx.Graph,
        constants: dict[str, torch.Tensor],
        lengths: fx.Node,
        size: fx.Node,
        max_length: int,
    ) -> None:
        self.graph, self.constants, self.max_length = graph, constants, max_length
        self.lengths, self.size = lengths, size
        self._made: dict[Any, fx.Node] = {}
        self._positions: tuple[fx.Node, fx.Node] | None = None
        self._held: list[tuple[torch.Tensor, fx.Node]] = []
        self._learned: dict[fx.Node, fx.Node] = {}

    def of(self, node: fx.Node, sight: Sight) -> fx.Node:
        """The mask of an attention, [batch, heads or 1, tokens, max_length]."""
        query: Any = node.args[0]
        dtype = torch.float32 if is_expanded(node) else query.meta["val"].dtype
        bias = None if sight.bias is None else self._constant(sight.bias.to(dtype)[None, :, None])
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
            return None if distances is None else self._constant(distances.T.to(dtype))
        if distances.term not in self._learned:
            index = self._constant(distances.index)
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
            self._positions = rows, self._constant(torch.arange(self.max_length))
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

    def _constant(self, value: torch.Tensor) -> fx.Node:
        for held, node in self._held:
            if held.shape == value.shape and torch.equal(held, value):
                return node
        name = f"mask_{len(self._held)}"
        last = self.graph.find_nodes(op="placeholder")[-1]
        with self.graph.inserting_after(last):
            made = self.graph.placeholder(name)
        with self.lengths.meta["val"].fake_mode:
            made.meta["val"] = torch.empty(value.shape, dtype=value.dtype)
        self.constants[name] = value.contiguous()
        self._held.append((value, made))
        return made


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
