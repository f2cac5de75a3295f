"""split_encoder: of an encoder-decoder, what the decoder's tokens do not decide becomes a graph of
its own, run once a text.

    before                                     encoder                     decoder
    %x: i64[b,9]   %t: i64[b,s]                %x: i64[b,9]                %t: i64[b,s]
    %1: f32[b,9,64] = ... %x ...               %1 = ... %x ...             %e0: f32[b,8,9,8]
    %k: f32[b,8,9,8] = ... linear(%1, %wk)     %k = ... linear(%1, %wk)    %e1: f32[b,8,9,8]
    %v: f32[b,8,9,8] = ... linear(%1, %wv)     %v = ... linear(%1, %wv)    %q = ... %t ...
    %q: f32[b,8,s,8] = ... %t ...              return (%k, %v)             %a = attention(%q, %e0,
    %a = attention(%q, %k, %v)                                                      %e1)

So the keys and values of cross-attention are made once, and a decoder is left as any other.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import fx

from autoshard.export.rank_graph.cache import reads
from autoshard.export.rank_graph.tidy import sizes_from_inputs

TOKENS = "decoder_input_ids"
"""The input that a decoder of an encoder-decoder continues, as transformers names it."""

ENCODED = "encoded"
"""The role of what the encoder hands to the decoder."""


def split_encoder(
    gm: fx.GraphModule, inputs: Collection[str], sequence: str
) -> tuple[fx.GraphModule, list[str]]:
    """The encoder's graph and the names of what it returns, which become placeholders of `gm`.

    inputs: targets of the caller's placeholders, `TOKENS` among them. sequence: the symbol of the
    number of its tokens. Every node has its value.
    """
    graph = gm.graph
    _drop(graph, ())
    given = {n for n in graph.find_nodes(op="placeholder") if n.target in inputs}
    source = {n for n in given if n.target != TOKENS}
    encoded, of_tokens = set(source), given - source
    for node in graph.nodes:
        tensor = isinstance(node.meta.get("val"), torch.Tensor)
        if node.op != "call_function" or (not tensor and not reads(node, sequence)):
            continue  # the rows of a batch are as many here as there
        if reads(node, sequence) or not of_tokens.isdisjoint(node.all_input_nodes):
            of_tokens.add(node)
        elif not encoded.isdisjoint(node.all_input_nodes):
            encoded.add(node)
    handed = [
        node
        for node in graph.nodes
        if node in encoded
        and isinstance(node.meta["val"], torch.Tensor)
        and not of_tokens.isdisjoint(node.users)
    ]
    copy, known = fx.Graph(), dict[fx.Node, fx.Node]()
    copy.graph_copy(graph, known)
    copy.output(tuple(known[node] for node in handed))
    for node, new in known.items():
        new.meta = dict(node.meta)
    encoder = fx.GraphModule(gm, copy)
    sizes_from_inputs(copy, {str(n.target) for n in source})
    _drop(copy, {TOKENS})
    encoder.recompile()

    names = [f"{ENCODED}_{i}" for i in range(len(handed))]
    tokens = next(n for n in given if n.target == TOKENS)
    last = tokens
    results: Any = graph.output_node().args[0]
    kept = [value for value in results if value not in encoded]  # an encoder's own outputs
    graph.output_node().args = (tuple(kept),)
    for node, name in zip(handed, names):
        with graph.inserting_after(last):
            last = graph.placeholder(name)
        last.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(last)
    sizes_from_inputs(graph, {TOKENS})
    _drop(graph, {str(n.target) for n in source})
    gm.recompile()
    return encoder, names


def _drop(graph: fx.Graph, targets: Collection[str]) -> None:
    """Erase what nothing reads (attention counts as random, and would stay), and these inputs."""
    graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output"))
    for node in graph.find_nodes(op="placeholder"):
        if node.target in targets and not node.users:
            graph.erase_node(node)
