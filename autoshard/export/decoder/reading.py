"""From a captured graph to a Decoder: the role of every parameter, by how it is used.

Names of modules and parameters play no part. Each anchor (anchors.py) is found from those it
reads; what lies between is told by values (probing.py).
"""

from __future__ import annotations

import torch
from torch import fx

from autoshard.export.decoder.anchors import Anchors, find_anchors
from autoshard.export.decoder.attention import read_attention
from autoshard.export.decoder.experts import read_experts
from autoshard.export.decoder.mlp import LayerMlp, read_mlps
from autoshard.export.decoder.probing import evaluate, softcap, sources
from autoshard.export.decoder.stream import Stream
from autoshard.export.decoder.structure import Attention, Decoder, Layer, Linear
from autoshard.export.errors import export_error
from autoshard.export.serial_graph import ModelGraph, scan_of


def read_decoder(graph: ModelGraph) -> Decoder:
    """The structure of a decoder-only language model.

    Raises ExportError, naming the node and the user's line, where the graph is something else.
    """
    scan = scan_of(graph.nodes)
    if scan is not None:
        raise export_error(
            "a state-space model scans its sequence here; TensorRT-LLM checkpoints are written of "
            "decoders with attention",
            scan,
            "Export a Hugging Face directory.",
        )
    return _Reader(graph).run()


class _Reader:
    def __init__(self, graph: ModelGraph) -> None:
        self.graph = graph
        self.found: Anchors = find_anchors(graph)
        self.all = self.found.all()
        self.role: dict[fx.Node, str] = {}

    def run(self) -> Decoder:
        if not self.found.attention:
            raise export_error(
                "the model has no attention: neither scaled_dot_product_attention nor products "
                "around a softmax",
                remedy="Write attention with torch.nn.functional.scaled_dot_product_attention; "
                'a Hugging Face model is loaded with attn_implementation="sdpa".',
            )
        tokens, positions = self._embeddings()
        head, cap = self._head()
        attentions = [self._attention(node) for node in self.found.attention]
        mlps = read_experts(self.graph, self.found, self.role)
        mlps = mlps or read_mlps(self.graph, self.found, self.role)
        if len(mlps) != len(attentions):
            raise export_error(
                f"{len(attentions)} attentions and {len(mlps)} MLPs; each layer has one of each"
            )
        stream = Stream(self.graph, self.found, tokens, positions)
        layers = tuple(
            self._layer(stream, attention, mlp)
            for attention, mlp in zip(attentions, mlps, strict=True)
        )
        for node in self.found.linear:
            if node not in self.role:
                raise export_error("a projection that is no part of attention, MLP or head", node)
        norm = stream.norm_before(head)
        stream.check_norms()
        table = self.found.embedding[tokens]
        learned = None if positions is None else self.found.embedding[positions]
        first = 0 if positions is None else self._first_position(positions)
        return Decoder(
            vocab=table.rows,
            hidden=table.columns,
            embedding=table.table,
            embedding_scale=stream.embedding_scale,
            embedding_norm=stream.embedding_norm,
            positions=None if learned is None else learned.table,
            first_position=first,
            max_positions=None if learned is None else learned.rows - first,
            layers=layers,
            norm=norm,
            head=self.found.linear[head],
            softcap=cap,
        )

    def _embeddings(self) -> tuple[fx.Node, fx.Node | None]:
        """(token embedding, position embedding)."""
        tokens: list[fx.Node] = []
        positions: list[fx.Node] = []
        inputs = {
            node: None
            for node in self.graph.nodes
            if node.op == "placeholder" and node not in self.graph.constants
        }
        for node, one in self.found.embedding.items():
            (tokens if sources(one.index, inputs) else positions).append(node)
        if len(tokens) != 1 or len(positions) > 1:
            raise export_error(
                f"{len(tokens)} embeddings of tokens and {len(positions)} of positions; "
                "a decoder has 1, and at most 1",
                next(iter(self.found.embedding), None),
            )
        return tokens[0], positions[0] if positions else None

    def _first_position(self, positions: fx.Node) -> int:
        """The row of the first token's position; later ones must count on from there."""
        index = evaluate(self.graph, self.found.embedding[positions].index, {}).flatten()
        first = int(index[0])
        if not torch.equal(index.long(), torch.arange(first, first + len(index))):
            raise export_error(
                f"positions are looked up as {index.tolist()}, which do not count up", positions
            )
        return first

    def _head(self) -> tuple[fx.Node, float | None]:
        """(the projection that makes logits, c of c * tanh(logits / c))."""
        (output,) = [node for node in self.graph.nodes if node.op == "output"]
        # a model that sets an attribute in forward, such as long frequencies, returns it too
        of_tokens = [
            one
            for one in output.args[0]  # type: ignore[union-attr]
            if isinstance(one, fx.Node)
            and any(n in self.found.linear for n in sources(one, self.all))
        ]
        if not of_tokens:
            raise export_error("no output is the result of a projection", output)
        returned = of_tokens[0]
        heads = [node for node in sources(returned, self.all) if node in self.found.linear]
        values = {
            n: torch.linspace(-99, 99, n.meta["val"].numel(), dtype=torch.float64).view(
                n.meta["val"].shape
            )
            for n in heads
        }
        if len(heads) == 1:
            (head,) = heads
            result = evaluate(self.graph, returned, values)
            self.role[head] = "head"
            if torch.equal(result.flatten(), values[head].flatten()):
                return head, None
            cap = softcap(lambda x: evaluate(self.graph, returned, {head: x}), values[head].shape)
            if cap is not None:
                return head, cap
        raise export_error("the first output is not the result of one projection", returned)

    def _attention(self, node: fx.Node) -> Attention:
        users = [other for other, x in self.found.inputs.items() if sources(x, self.all) == [node]]
        if len(users) != 1:
            raise export_error(f"{len(users)} projections read attention, not 1", node)
        site = self.found.attention[node]
        attention = read_attention(self.graph, self.found, site, users[0])
        self.role[users[0]] = "dense"
        for operand in (site.query, site.key, site.value):
            (read,) = sources(operand, self.all)
            if read in self.found.norm:
                (read,) = sources(self.found.normed[read], self.all)
            self.role[read] = "qkv"
        return attention

    def _layer(self, stream: Stream, attention: Attention, mlp: LayerMlp) -> Layer:
        for norm in (attention.query_norm, attention.key_norm):
            if norm is not None:
                stream.use(norm)
        dense = self._at(attention.dense)
        first = stream.norm_before(self._at(attention.query))
        reads = [stream.norm_before(self._at(one)) for one in mlp.readers]
        if any(norm.node is not reads[0].node for norm in reads):
            raise export_error("does not read the norm that the rest of the MLP reads", mlp.down)
        post_attention, post_mlp = stream.norm_after(dense), stream.norm_after(mlp.down)
        parallel = dense not in stream.reads(reads[0]) and (
            post_attention is None or post_attention.node not in stream.reads(reads[0])
        )
        stream.check(first)
        if parallel:
            stream.check(reads[0])
        stream.add(dense if post_attention is None else post_attention.node)
        if not parallel:
            stream.check(reads[0])
        if mlp.routed and post_mlp is None:
            stream.add_routed(mlp.routed)
        else:
            stream.add(mlp.down if post_mlp is None else post_mlp.node)
        return Layer(
            attention=attention,
            mlp=mlp.mlp,
            attention_norm=first,
            mlp_norm=first if reads[0].node is first.node else reads[0],
            post_attention_norm=post_attention,
            post_mlp_norm=post_mlp,
            parallel=parallel,
        )

    def _at(self, linear: Linear) -> fx.Node:
        """The anchor of a projection: where its bias is added."""
        return next(n for n, one in self.found.linear.items() if one.node is linear.node)
