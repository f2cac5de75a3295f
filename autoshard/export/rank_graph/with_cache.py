"""with_cache: a graph of whole sequences becomes one that continues them.

    before                                          after
    %t: i64[b,s]                                    %t: i64[b,s]
    %0: i64[s] = arange(0, s, 1)                    %past: i32[b]
    %1: i64[1,s] = unsqueeze(%0, 0)                 %kc: f32[b,2,64,16]    %vc: f32[b,2,64,16]
    ...                                             %0: i64[b,s] = past + arange(0, s, 1)
    %5: f32[b,8,s,16] = attention(%q, %k, %v,       ...
        causal="upper_left", scale=0.25)            %3 = update_cache(%kc, %k, %past)
                                                    %4 = update_cache(%vc, %v, %past)
                                                    %5: f32[b,8,s,16] = attention(%q, %3, %4,
                                                        lengths=past + s, causal="lower_right",
                                                        scale=0.25)
                                                    return (..., %3, %4)

One graph serves the prompt (past = 0) and every later token, of rows of different lengths: a
shorter prompt is filled up behind its end, and the next token overwrites what was filled in.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autoshard.export.errors import export_error
from autoshard.export.rank_graph.operators import LOWER_RIGHT, UPPER_LEFT, attention, update_cache

aten = torch.ops.aten

LENGTHS = "past_lengths"


def with_cache(gm: fx.GraphModule, tokens: str, max_length: int, mode: Any) -> dict[str, str]:
    """Rewrite `gm.graph` in place; the role of each new input, by its name, in order.

    tokens: target of the placeholder of shape [batch, sequence]. max_length: tokens a cache holds.
    Raises ExportError for attention that is not causal over the sequence, and for positions that
    are not counted as [1, sequence].
    """
    graph = gm.graph
    inputs = {str(n.target): n for n in graph.find_nodes(op="placeholder")}
    ids = inputs[tokens]
    batch, sequence = ids.meta["val"].shape[:2]
    nodes = graph.find_nodes(op="call_function", target=attention)
    if not nodes:
        raise export_error("the model has no attention, so there is nothing to cache")
    for node in nodes:
        _check(node, sequence)

    def placeholder(name: str, shape: tuple[Any, ...], dtype: torch.dtype, after: fx.Node) -> Any:
        with graph.inserting_after(after):
            made = graph.placeholder(name)
        with mode:
            made.meta["val"] = torch.empty(shape, dtype=dtype)
        return made

    lengths = placeholder(LENGTHS, (batch,), torch.int32, ids)
    roles = {LENGTHS: "lengths"}
    last = lengths
    caches = []
    for i, node in enumerate(nodes):
        pair = []
        for kind, operand in zip(("key", "value"), node.args[1:3]):
            _, heads, _, width = operand.meta["val"].shape
            name = f"{kind}_cache_{i}"
            dtype = operand.meta["val"].dtype
            last = placeholder(name, (batch, heads, max_length, width), dtype, last)
            roles[name] = f"{kind}_cache"
            pair.append(last)
        caches.append(pair)
    first = _first_call(graph)
    with graph.inserting_before(first):
        size = graph.call_function(aten.sym_size.int, (ids, 1))
        total = graph.call_function(aten.add.Tensor, (lengths, size))
        steps = graph.call_function(aten.arange.start_step, (0, size, 1), {"dtype": torch.int64})
        start = graph.call_function(aten._to_copy.default, (lengths,), {"dtype": torch.int64})
        column = graph.call_function(aten.unsqueeze.default, (start, 1))
        positions = graph.call_function(aten.add.Tensor, (column, steps))
    _replace_positions(graph, steps, positions, sequence)
    results = []
    for node, pair in zip(nodes, caches):
        operands = []
        with graph.inserting_before(node):
            for cache, operand in zip(pair, node.args[1:3]):
                new = graph.call_function(update_cache, (cache, operand, lengths))
                new.meta = {k: v for k, v in node.meta.items() if k != "val"}
                operands.append(new)
        node.args = (node.args[0], *operands, None, total)
        node.kwargs = {**node.kwargs, "causal": LOWER_RIGHT}
        results += operands
    output = graph.output_node()
    output.args = ((*output.args[0], *results),)  # type: ignore[misc]
    return roles


def _check(node: fx.Node, sequence: Any) -> None:
    query, key = (n.meta["val"] for n in node.args[:2])  # type: ignore[union-attr]
    if node.kwargs["causal"] != UPPER_LEFT or node.args[3] is not None:
        raise export_error(
            "a key-value cache needs attention that is causal, and this has another mask",
            node,
            "Export without a cache, or with a maximum sequence that fits the model's window.",
        )
    if str(query.shape[2]) != str(sequence) or str(key.shape[2]) != str(sequence):
        raise export_error(
            f"a key-value cache needs attention over the sequence, and this is over "
            f"{query.shape[2]} x {key.shape[2]} tokens",
            node,
        )


def _first_call(graph: fx.Graph) -> fx.Node:
    return next(n for n in graph.nodes if n.op not in ("placeholder",))


def _replace_positions(graph: fx.Graph, own: fx.Node, positions: fx.Node, sequence: Any) -> None:
    """Positions [1, sequence] that the graph counts become those of each row."""
    for node in graph.find_nodes(op="call_function", target=aten.arange.start_step):
        length = node.meta["val"].shape[0] if "val" in node.meta else None
        if node is own or length is None or str(length) != str(sequence):
            continue
        for user in list(node.users):
            is_row = user.target is aten.unsqueeze.default and user.args[1] in (0, -2)
            if not is_row or node.args[0] != 0 or node.args[2:] not in ((), (1,)):
                raise export_error(
                    "a key-value cache needs positions counted as [1, sequence], and these are "
                    f"read by {user.name}",
                    node,
                    "Compute them as torch.arange(sequence).unsqueeze(0).",
                )
            user.replace_all_uses_with(positions)
            graph.erase_node(user)
        graph.erase_node(node)
