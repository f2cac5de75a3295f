"""From a captured graph to a Decoder: the role of every parameter, by how it is used.

Names of modules and parameters play no part. Each anchor (anchors.py) is found from those it
reads; what lies between is told by values (probing.py).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, fx

from autoshard.export.decoder.anchors import Anchors, find_anchors
from autoshard.export.decoder.attention import read_attention
from autoshard.export.decoder.experts import read_experts
from autoshard.export.decoder.probing import activation, evaluate, gated_activation, sources
from autoshard.export.decoder.structure import Attention, Decoder, Layer, Linear, Mlp, Norm
from autoshard.export.errors import export_error
from autoshard.export.serial_graph import ModelGraph


def read_decoder(graph: ModelGraph) -> Decoder:
    """The structure of a decoder-only language model.

    Raises ExportError, naming the node and the user's line, where the graph is something else.
    """
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
                "the model has no scaled_dot_product_attention",
                remedy="Write attention with torch.nn.functional.scaled_dot_product_attention; "
                'a Hugging Face model is loaded with attn_implementation="sdpa".',
            )
        embedding, positions, scale = self._embeddings()
        head = self._head()
        attentions = [self._attention(node) for node in self.found.attention]
        mlps = self._mlps(len(attentions))
        layers = tuple(
            self._layer(attention, mlp) for attention, mlp in zip(attentions, mlps, strict=True)
        )
        for node in self.found.linear:
            if node not in self.role:
                raise export_error("a projection that is no part of attention, MLP or head", node)
        norm = self._only_norm(self.found.inputs[head], head)
        table = self.found.embedding[embedding]
        learned = None if positions is None else self.found.embedding[positions]
        return Decoder(
            vocab=table.rows,
            hidden=table.columns,
            embedding=table.table,
            embedding_scale=scale,
            positions=None if learned is None else learned.table,
            max_positions=None if learned is None else learned.rows,
            layers=layers,
            norm=norm,
            head=self.found.linear[head],
        )

    def _embeddings(self) -> tuple[fx.Node, fx.Node | None, float]:
        """(token embedding, position embedding, what token embeddings are multiplied by)."""
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
        if positions:
            index = evaluate(self.graph, self.found.embedding[positions[0]].index, {}).flatten()
            if not torch.equal(index, torch.arange(len(index))):
                raise export_error(
                    f"positions are looked up as {index.tolist()}, the format counts from 0",
                    positions[0],
                )
        first = next(iter(self.found.normed.values()))
        given = {n: torch.ones(n.meta["val"].shape, dtype=torch.float64) for n in tokens}
        given |= {n: torch.zeros(n.meta["val"].shape, dtype=torch.float64) for n in positions}
        scaled = evaluate(self.graph, first, given)
        if not bool((scaled == scaled.flatten()[0]).all()):
            raise export_error("is not the scaled embedding that the first norm expects", first)
        return tokens[0], positions[0] if positions else None, scaled.flatten()[0].item()

    def _head(self) -> fx.Node:
        (output,) = [node for node in self.graph.nodes if node.op == "output"]
        returned = output.args[0][0]  # type: ignore[index]
        assert isinstance(returned, fx.Node)
        heads = [node for node in sources(returned, self.all) if node in self.found.linear]
        ones = {
            n: torch.arange(n.meta["val"].numel(), dtype=torch.float64).view(n.meta["val"].shape)
            for n in heads
        }
        if len(heads) != 1 or not torch.equal(
            evaluate(self.graph, returned, ones).flatten(), ones[heads[0]].flatten()
        ):
            raise export_error("the first output is not the result of one projection", returned)
        self.role[heads[0]] = "head"
        return heads[0]

    def _attention(self, node: fx.Node) -> Attention:
        users = [other for other, x in self.found.inputs.items() if sources(x, self.all) == [node]]
        if len(users) != 1:
            raise export_error(f"{len(users)} projections read attention, not 1", node)
        attention = read_attention(self.graph, self.found, node, users[0])
        self.role[users[0]] = "dense"
        for operand in node.args[:3]:
            (projection,) = sources(operand, self.all)  # type: ignore[arg-type]
            self.role[projection] = "qkv"
        return attention

    def _mlps(self, count: int) -> list[Mlp]:
        """The MLP of each layer, in order of their down-projections."""
        experts = read_experts(self.graph, self.found, self.role)
        if experts:
            mlps = experts
        else:
            mlps = [self._mlp(down, feeds) for down, feeds in self._downs()]
        if len(mlps) != count:
            raise export_error(
                f"{count} attentions and {len(mlps)} MLPs; each layer has one of each"
            )
        return mlps

    def _downs(self) -> list[tuple[fx.Node, list[fx.Node]]]:
        found = []
        for node, x in self.found.inputs.items():
            feeds = sources(x, self.all)
            if node not in self.role and all(n in self.found.linear for n in feeds):
                if all(n not in self.role for n in feeds):
                    found.append((node, feeds))
        for down, feeds in found:
            self.role.update(dict.fromkeys(feeds, "up"))
            self.role[down] = "down"
        return found

    def _mlp(self, down: fx.Node, feeds: list[fx.Node]) -> Mlp:
        linear, x = self.found.linear, self.found.inputs[down]

        def between(*values: Tensor) -> Tensor:
            # the same values in the first columns of every row
            given = {}
            for node, value in zip(feeds, values):
                full = torch.zeros(node.meta["val"].shape, dtype=torch.float64)
                wide = value.repeat(full.shape[-1] // len(value) + 1)[: full.shape[-1]]
                given[node] = full + wide
            result = evaluate(self.graph, x, given)
            return result.reshape(-1, result.shape[-1])[0]

        width = linear[feeds[0]].outputs
        if len(feeds) == 1:
            name = activation(_cut(between, width))
            if name is not None and linear[down].inputs == width:
                up = linear[feeds[0]]
                return Mlp(up=up, gate=None, down=linear[down], activation=name)
        elif len(feeds) == 2 and linear[feeds[1]].outputs == width:
            gated = gated_activation(_cut(between, width))
            if gated is not None:
                name, index = gated
                up, gate = linear[feeds[1 - index]], linear[feeds[index]]
                return Mlp(up=up, gate=gate, down=linear[down], activation=name)
        raise export_error("its input is no activation, gated or not, that is known", down)

    def _only_norm(self, x: fx.Node, user: fx.Node) -> Norm:
        norms = sources(x, self.all)
        if len(norms) != 1 or norms[0] not in self.found.norm:
            raise export_error("does not read the result of one norm", user)
        return self.found.norm[norms[0]]

    def _layer(self, attention: Attention, mlp: Mlp) -> Layer:
        first = self._only_norm(self._input_of(attention.query), attention.query.node)
        up = mlp.up if mlp.router is None else mlp.router
        second = self._only_norm(self._input_of(up), up.node)
        read = sources(self.found.normed[second.node], self.all)
        dense = next(n for n, one in self.found.linear.items() if one.node is attention.dense.node)
        return Layer(attention, mlp, first, second, parallel=dense not in read)

    def _input_of(self, linear: Linear) -> fx.Node:
        return next(
            x for n, x in self.found.inputs.items() if self.found.linear[n].node is linear.node
        )


def _cut(between: Callable[..., Tensor], width: int) -> Callable[..., Tensor]:
    """Probe in as many pieces as fit the width: narrow test models have few columns."""

    def run(*values: Tensor) -> Tensor:
        length = len(values[0])
        pieces = []
        for start in range(0, length, width):
            part = [value[start : start + width] for value in values]
            pieces.append(between(*part)[: len(part[0])])
        return torch.cat(pieces)

    return run
