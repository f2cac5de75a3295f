"""The stream that norms of a decoder read: a plain sum of the embedding and of each layer's parts.

A multiplier on a residual, a norm that no role accounts for or a part that is left out would be
lost in a checkpoint, so the sum is computed from values at each norm and compared.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from autoshard.export.decoder.anchors import Anchors
from autoshard.export.decoder.probing import close, evaluate, sources
from autoshard.export.decoder.structure import Norm
from autoshard.export.errors import export_error
from autoshard.export.serial_graph import ModelGraph


class Stream:
    """What has been added so far, from the first layer on, and the norms that have a role."""

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

    def reads(self, norm: Norm) -> list[fx.Node]:
        """The anchors that a norm reads."""
        return self.read[norm.node]

    def use(self, norm: Norm) -> None:
        """Count a norm as one with a role."""
        self.used.add(norm.node)

    def norm_before(self, projection: fx.Node) -> Norm:
        """The norm whose result a projection reads."""
        norms = sources(self.found.inputs[projection], self.anchors)
        if len(norms) != 1 or norms[0] not in self.found.norm:
            raise export_error("does not read the result of one norm", projection)
        norm = self.found.norm[norms[0]]
        self.use(norm)
        return norm

    def norm_after(self, projection: fx.Node) -> Norm | None:
        """The norm that reads a projection alone, before it is added to the stream."""
        for node, norm in self.found.norm.items():
            if self.read[node] == [projection]:
                self.use(norm)
                self._equals(norm, {projection: 1.0})
                return norm
        return None

    def add(self, part: fx.Node) -> None:
        """A part that is added as it is."""
        self.parts[part] = 1.0

    def add_routed(self, anchors: tuple[fx.Node, ...]) -> None:
        """A mixture of experts: what it adds is checked where it is read, and is nothing where the
        results of its projections are zero, as they are made to be here."""
        self.silent += anchors

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
        missing = [part for part in parts if part not in self.reads(norm)]
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
