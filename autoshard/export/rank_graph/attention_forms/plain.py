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
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autoshard.export.errors import export_error
from autoshard.export.rank_graph.attention_forms.masks import Sight, read_mask
from autoshard.export.rank_graph.graph import call_like
from autoshard.export.rank_graph.operators import NONE, UPPER_LEFT, attention
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
    kwargs: dict[str, Any] = {"causal": causal, "scale": float(scale)}
    with graph.inserting_before(node):
        new = graph.call_function(attention, (query, key, value, mask), kwargs)
    new.meta = dict(node.meta)
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
    new = call_like(node, aten.slice.Tensor, source, 1, first, last + 1)
    val = source.meta["val"]
    with val.fake_mode:
        new.meta["val"] = aten.slice.Tensor(val, 1, first, last + 1)
    return new
