"""From a captured graph to a Decoder: the role of every parameter, by how it is used.

Names of modules and parameters play no part. Each anchor (anchors.py) is found from those it
reads; what lies between is told by values (probing.py). The stream that norms read is a plain sum
of the embedding and of each layer's parts. A multiplier on a residual, a norm that no role accounts
for or a part that is left out would be lost in a checkpoint, so the sum is computed from values at
each norm and compared.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from autoshard.export.decoder.anchors import Anchors, find_anchors
from autoshard.export.decoder.heads import read_attention
from autoshard.export.decoder.mlp import LayerMlp, read_experts, read_mlps
from autoshard.export.decoder.probing import close, evaluate, sources
from autoshard.export.decoder.structure import Attention, Decoder, Layer, Linear, Norm
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
        if len(heads) == 1:
            (head,) = heads
            self.role[head] = "head"
            shape = head.meta["val"].shape
            values = torch.linspace(-99, 99, shape.numel(), dtype=torch.float64).view(shape)

            def logits(x: Tensor) -> Tensor:
                return evaluate(self.graph, returned, {head: x})

            if torch.equal(logits(values).flatten(), values.flatten()):
                return head, None
            cap = float(f"{logits(torch.full_like(values, 1e9)).flatten()[0]:.7g}")
            if cap and close(logits(values), cap * torch.tanh(values / cap)):
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
                stream.used.add(norm.node)
        dense = self._at(attention.dense)
        first = stream.norm_before(self._at(attention.query))
        reads = [stream.norm_before(self._at(one)) for one in mlp.readers]
        if any(norm.node is not reads[0].node for norm in reads):
            raise export_error("does not read the norm that the rest of the MLP reads", mlp.down)
        post_attention, post_mlp = stream.norm_after(dense), stream.norm_after(mlp.down)
        before = stream.read[reads[0].node]
        added = dense if post_attention is None else post_attention.node
        parallel = dense not in before and added not in before
        stream.check(first)
        if parallel:
            stream.check(reads[0])
        stream.parts[added] = 1.0
        if not parallel:
            stream.check(reads[0])
        if mlp.routed and post_mlp is None:
            stream.silent += mlp.routed
        else:
            stream.parts[mlp.down if post_mlp is None else post_mlp.node] = 1.0
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


class Stream:
    """What has been added so far, from the first layer on, and the norms that have a role.

    silent: projections of mixtures of experts; what a mixture adds is checked where it is read, and
    is nothing where the results of its projections are zero, as they are made to be here.
    """

    def __init__(
        self, graph: ModelGraph, found: Anchors, tokens: fx.Node, positions: fx.Node | None
    ) -> None:
        self.graph, self.found, self.anchors = graph, found, found.all()
        self.used: set[fx.Node] = set()
        self.read = {node: sources(x, self.anchors) for node, x in found.normed.items()}
        self.silent: list[fx.Node] = []
        first = next(iter(found.normed.values()))
        embedded = [tokens] if positions is None else [tokens, positions]
        if not set(next(iter(self.read.values()))) <= set(embedded):
            raise export_error(
                "the first norm reads more than the embedding: norms come after the sums",
                next(iter(self.read)),
                "The checkpoint format stands for norms before attention and MLP.",
            )
        self.embedding_scale = self._scale(first, tokens, positions)
        self.parts = {node: self.embedding_scale if node is tokens else 1.0 for node in embedded}
        self.embedding_norm = self._embedding_norm(first)
        if self.embedding_norm is not None:
            self.check(self.embedding_norm)
            self.parts = {self.embedding_norm.node: 1.0}

    def norm_before(self, projection: fx.Node) -> Norm:
        """The norm whose result a projection reads."""
        norms = sources(self.found.inputs[projection], self.anchors)
        if len(norms) != 1 or norms[0] not in self.found.norm:
            raise export_error("does not read the result of one norm", projection)
        norm = self.found.norm[norms[0]]
        self.used.add(norm.node)
        return norm

    def norm_after(self, projection: fx.Node) -> Norm | None:
        """The norm that reads a projection alone, before it is added to the stream."""
        for node, norm in self.found.norm.items():
            if self.read[node] == [projection]:
                self.used.add(norm.node)
                self._equals(norm, {projection: 1.0})
                return norm
        return None

    def check(self, norm: Norm) -> None:
        """What a norm reads must be the sum of all parts so far."""
        self._equals(norm, self.parts)

    def check_norms(self) -> None:
        """The last norm reads the whole sum, and every norm has a role."""
        last = list(self.found.norm)[-1]
        self.check(self.found.norm[last])
        for node in self.found.norm:
            if node not in self.used:
                raise export_error("a norm that is none of a layer's, nor the last", node)

    def _equals(self, norm: Norm, parts: dict[fx.Node, float]) -> None:
        node = self.found.normed[norm.node]
        numbers = torch.Generator().manual_seed(0)
        given: dict[fx.Node, Tensor] = {}
        for part in [*parts, *self.silent]:
            shape = part.meta["val"].shape
            values = torch.rand(shape, dtype=torch.float64, generator=numbers)
            given[part] = torch.zeros_like(values) if part in self.silent else values
        hidden = node.meta["val"].shape[-1]
        total = node.meta["val"].numel() // hidden
        expected = torch.zeros(total, hidden, dtype=torch.float64)
        for part, weight in parts.items():
            rows = given[part].reshape(-1, hidden)
            expected = expected + weight * rows.repeat(total // len(rows), 1)
        missing = [part for part in parts if part not in self.read[norm.node]]
        if missing or not close(evaluate(self.graph, node, given).reshape(-1, hidden), expected):
            raise export_error(
                "does not read the plain sum of the embedding and of what the layers before it add",
                node,
                "The checkpoint format has no multipliers on them.",
            )

    def _scale(self, first: fx.Node, tokens: fx.Node, positions: fx.Node | None) -> float:
        """What token embeddings are multiplied by before the first norm."""
        given = {tokens: torch.ones(tokens.meta["val"].shape, dtype=torch.float64)}
        if positions is not None:
            given[positions] = torch.zeros(positions.meta["val"].shape, dtype=torch.float64)
        scaled = evaluate(self.graph, first, given)
        if not bool((scaled == scaled.flatten()[0]).all()):
            raise export_error("is not the scaled embedding that the first norm expects", first)
        return scaled.flatten()[0].item()

    def _embedding_norm(self, first: fx.Node) -> Norm | None:
        """The first norm, where what follows does not read the embedding beside it."""
        node = next(n for n, x in self.found.normed.items() if x is first)
        if not any(node in read for read in self.read.values()):
            return None
        self.used.add(node)
        return self.found.norm[node]
