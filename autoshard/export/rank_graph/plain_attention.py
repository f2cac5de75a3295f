"""plain_attention: scaled_dot_product_attention becomes `operators.attention`.

    before                                              after
    %m: bool[b,1,s,s] = ... arange, le, index ...       %4: f32[b,8,s,16] = attention(%q, %k, %v,
    %0: f32[b,2,1,s,16] = unsqueeze(%k, 2)                  causal="upper_left", scale=0.25)
    %1: f32[b,2,4,s,16] = expand(%0, [b,2,4,s,16])
    %2: f32[b,8,s,16] = reshape(%1, [b,8,s,16])
    ... the same for %v ...
    %4: f32[b,8,s,16] = scaled_dot_product_attention(%q, %2, %3, %m, scale=0.25)

- A mask that is computed from sizes alone and is the causal one becomes the causal flag. That is
  found by computing it, at a small size and at the largest the caller will use, so that a sliding
  window counts as causal exactly where no sequence is longer than the window.
- Repeated key and value heads become the heads they repeat.

Not done: a mask that depends on an input, and any other mask, stays a mask.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from autoshard.export.errors import export_error
from autoshard.export.rank_graph.operators import NONE, UPPER_LEFT, attention
from autoshard.passes import unrepeated

aten = torch.ops.aten

PROVEN = 8192
"""Masks are computed whole up to this many tokens; s * s entries take memory."""


def plain_attention(
    gm: fx.GraphModule,
    constants: Mapping[str, torch.Tensor],
    sizes: Mapping[str, str],
    largest: Mapping[str, int],
) -> None:
    """Rewrite `gm.graph` in place. constants: values by placeholder. sizes: the name of each
    symbol; largest: the largest value of each name. Raises ExportError for dropout, and for
    attention that is not of [batch, heads, tokens, head_dim]."""
    graph = gm.graph
    target = aten.scaled_dot_product_attention.default
    proofs: dict[fx.Node, bool] = {}
    for node in graph.find_nodes(op="call_function", target=target):
        query, key, value = node.args[:3]
        rest = dict(zip(("attn_mask", "dropout_p", "is_causal"), node.args[3:]))
        rest.update(node.kwargs)
        mask = rest.get("attn_mask")
        if rest.get("dropout_p"):
            raise export_error(f"attention drops out with probability {rest['dropout_p']}", node)
        shapes = [n.meta["val"].shape for n in (query, key, value)]
        if any(len(shape) != 4 for shape in shapes):
            raise export_error(
                f"attention of {len(shapes[0])} dims; engines have it of "
                "[batch, heads, tokens, head_dim]",
                node,
            )
        causal = bool(rest.get("is_causal"))
        if mask is not None and not causal:
            if mask not in proofs:
                proofs[mask] = _is_causal(mask, constants, sizes, largest)
            if proofs[mask]:
                causal, mask = True, None
        scale = rest.get("scale")
        if scale is None:
            scale = 1 / math.sqrt(shapes[0][-1])
        with graph.inserting_before(node):
            key, value = _unrepeated(graph, key), _unrepeated(graph, value)
            if key.meta["val"].shape[1] != value.meta["val"].shape[1]:
                key, value = node.args[1:3]
            new = graph.call_function(
                attention,
                (query, key, value, mask),
                {"causal": UPPER_LEFT if causal else NONE, "scale": float(scale)},
            )
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new)
        graph.erase_node(node)
    graph.eliminate_dead_code()


def _is_causal(
    mask: fx.Node,
    constants: Mapping[str, torch.Tensor],
    sizes: Mapping[str, str],
    largest: Mapping[str, int],
) -> bool:
    longest = largest.get("sequence", 1)
    tried = [{"batch": 2, "sequence": 7}, {"batch": 1, "sequence": min(longest, PROVEN)}]
    for numbers in tried:
        try:
            value = computed(mask, constants, {s: numbers[name] for s, name in sizes.items()}, {})
        except Unknown:
            return False
        if value.dim() < 2 or value.shape[-1] != value.shape[-2]:
            return False
        if not _allows_past(value):
            return False
    if longest > PROVEN and _limits(mask):
        raise export_error(
            f"its mask has a limit between {PROVEN} and {longest} tokens, which no causal flag "
            "says",
            mask,
            f"Give a maximum sequence of at most {PROVEN}.",
        )
    return True


def _allows_past(value: torch.Tensor) -> bool:
    """Whether the mask lets exactly the tokens up to each one's own through."""
    n = value.shape[-1]
    if value.dtype != torch.bool:
        shut = value <= torch.finfo(value.dtype).min / 2
        if not bool((shut | (value == 0)).all()):
            return False
        value = ~shut
    past = torch.ones(n, n, dtype=torch.bool).tril()
    return bool((value == past).all())


def _limits(mask: fx.Node) -> bool:
    """Whether a number larger than PROVEN takes part in a mask."""
    seen, todo = {mask}, [mask]
    while todo:
        node = todo.pop()
        if node.target is not aten.slice.Tensor:
            for arg in node.args:
                if isinstance(arg, int) and abs(arg) > PROVEN:
                    return True
        todo += [n for n in node.all_input_nodes if n not in seen]
        seen.update(node.all_input_nodes)
    return False


class Unknown(Exception):
    """A value depends on what only the caller knows."""


def computed(
    node: fx.Node,
    constants: Mapping[str, torch.Tensor],
    sizes: Mapping[str, int],
    known: dict[fx.Node, Any],
) -> Any:
    """The value of a node that `constants` and `sizes`, by symbol, decide; Unknown otherwise.

    known: values that are known already, by node; what is computed is added.
    """
    if node in known:
        return known[node]
    if node.op == "placeholder":
        if str(node.target) not in constants:
            raise Unknown
        known[node] = constants[str(node.target)]
    elif node.target is aten.sym_size.int and str(node.meta["val"]) in sizes:
        known[node] = sizes[str(node.meta["val"])]
    elif getattr(node.target, "namespace", "aten") != "aten":
        raise Unknown
    else:
        args, kwargs = fx.node.map_arg(
            (node.args, dict(node.kwargs)), lambda n: computed(n, constants, sizes, known)
        )
        known[node] = node.target(*args, **kwargs)  # type: ignore[operator]
    return known[node]


def _unrepeated(graph: fx.Graph, node: Any) -> Any:
    """The heads that `node`, [b, g * r, s, d], repeats r times each; `node` where it does not."""
    if node.target is aten.slice.Tensor and node.args[1] == 1:
        return _part(graph, node)
    found = unrepeated(node)
    return node if found is None else found


def _part(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """Some of the repeated heads, for a rank that shares key heads with others."""
    whole: Any = node.args[0]
    source = _unrepeated(graph, whole)
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
    new = graph.call_function(aten.slice.Tensor, (source, 1, first, last + 1))
    new.meta = {k: v for k, v in node.meta.items() if k != "val"}
    val = source.meta["val"]
    with val.fake_mode:
        new.meta["val"] = aten.slice.Tensor(val, 1, first, last + 1)
    return new
