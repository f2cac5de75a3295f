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

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autoshard.export.rank_graph.evaluation import reads
from autoshard.export.rank_graph.graph import inputs_of
from autoshard.export.rank_graph.tidy import sizes_from_inputs
from autoshard.passes import Context, Pass, Report
from autoshard.runtime.graph_meta import ENCODER, ROLE

TOKENS = "decoder_input_ids"
"""The input that a decoder of an encoder-decoder continues, as transformers names it."""

ENCODED = "encoded"
"""The role of what the encoder hands to the decoder."""


@dataclass(frozen=True)
class SplitEncoder(Pass):
    """See the module's text; the encoder's graph is in the metadata of the decoder's.

    sequence: the symbol of the number of the decoder's tokens.
    """

    sequence: str

    def rewrite(self, gm: fx.GraphModule, ctx: Context, report: Report) -> None:
        graph = gm.graph
        _drop(graph, ())
        given = inputs_of(graph)
        (tokens,) = [node for node in given if node.target == TOKENS]
        source = [node for node in given if node is not tokens]
        handed, encoded = self._handed(graph, tokens, source)
        gm.meta[ENCODER] = _encoder(gm, handed, source)
        results: Any = graph.output_node().args[0]
        kept = [value for value in results if value not in encoded]  # an encoder's own outputs
        graph.output_node().args = (tuple(kept),)
        last = tokens
        for i, node in enumerate(handed):
            with graph.inserting_after(last):
                last = graph.placeholder(f"{ENCODED}_{i}")
            last.meta = {"val": node.meta["val"], ROLE: ENCODED}
            node.replace_all_uses_with(last)
        sizes_from_inputs(graph, [tokens])
        _drop(graph, source)
        report.hits = len(handed)

    def _handed(
        self, graph: fx.Graph, tokens: fx.Node, source: list[fx.Node]
    ) -> tuple[list[fx.Node], set[fx.Node]]:
        """What the decoder reads of what its tokens do not decide, and all of the latter."""
        encoded, of_tokens = set(source), {tokens}
        for node in graph.nodes:
            tensor = isinstance(node.meta.get("val"), torch.Tensor)
            if node.op != "call_function" or (not tensor and not reads(node, self.sequence)):
                continue  # the rows of a batch are as many here as there
            if reads(node, self.sequence) or not of_tokens.isdisjoint(node.all_input_nodes):
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
        return handed, encoded


def _encoder(gm: fx.GraphModule, handed: list[fx.Node], source: list[fx.Node]) -> fx.GraphModule:
    """The graph of what is handed over, a copy."""
    copy, known = fx.Graph(), dict[fx.Node, fx.Node]()
    copy.graph_copy(gm.graph, known)
    copy.output(tuple(known[node] for node in handed))
    for node, new in known.items():
        new.meta = dict(node.meta)
    mine = [known[node] for node in source]
    sizes_from_inputs(copy, mine)
    _drop(copy, [node for node in inputs_of(copy) if node not in mine])
    return fx.GraphModule(gm, copy)


def _drop(graph: fx.Graph, inputs: Collection[fx.Node]) -> None:
    """Erase what nothing reads (attention counts as random, and would stay), and these inputs."""
    graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output"))
    for node in inputs:
        if not node.users:
            graph.erase_node(node)
