"""One attention of a decoder: heads, rotary embedding, which rows of which weights it uses."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor, fx

from autoshard.export.decoder.anchors import Anchors
from autoshard.export.decoder.probing import angles, evaluate, sources
from autoshard.export.decoder.structure import Attention, Linear
from autoshard.export.errors import export_error
from autoshard.export.serial_graph import ModelGraph


def read_attention(graph: ModelGraph, found: Anchors, node: fx.Node, dense: fx.Node) -> Attention:
    """The attention at `node`, whose result the projection `dense` reads.

    Raises ExportError where it is not causal, scaled by other than 1/sqrt(head_dim), or its heads
    are not consecutive groups.
    """
    return _Attention(graph, found, node).read(dense)


class _Attention:
    def __init__(self, graph: ModelGraph, found: Anchors, node: fx.Node) -> None:
        self.graph, self.found, self.node = graph, found, node
        schema = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
        self.given = {**dict(zip(schema, node.args)), **node.kwargs}

    def read(self, dense: fx.Node) -> Attention:
        self._causal()
        query, rotary = self._operand("query")
        key, key_rotary = self._operand("key")
        value, value_rotary = self._operand("value")
        heads, head_dim = query.shape
        scale = self.given.get("scale")
        if scale is not None and not math.isclose(scale, head_dim**-0.5, rel_tol=1e-6):
            raise export_error(
                f"scale {scale:.6g} is not 1/sqrt(head_dim {head_dim}) = {head_dim**-0.5:.6g}",
                self.node,
            )
        if value_rotary is not None or not _same(rotary, key_rotary):
            raise export_error(
                "query and key are not turned by the same rotary embedding", self.node
            )
        kv_heads = _heads(key)
        if kv_heads != _heads(value) or key.shape[1] != head_dim or value.shape[1] != head_dim:
            raise export_error("keys and values differ in their heads", self.node)
        self._order(dense, heads * head_dim)
        return Attention(
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            query=self._linear("query", query),
            key=self._linear("key", self._grouped(key, kv_heads, heads)),
            value=self._linear("value", self._grouped(value, kv_heads, heads)),
            dense=self.found.linear[dense],
            rotary=rotary,
            precision=self._precision(),
            node=self.node,
        )

    def _precision(self) -> float:
        """Relative, of the coarsest constant that query depends on."""
        operand = self.given["query"]
        assert isinstance(operand, fx.Node)
        read = sources(operand, {**self.found.all(), **self.graph.constants})
        dtypes = [self.graph.constants[n].dtype for n in read if n in self.graph.constants]
        return max((torch.finfo(d).eps for d in dtypes if d.is_floating_point), default=0.0)

    def _causal(self) -> None:
        mask = self.given.get("attn_mask")
        if self.given.get("is_causal") and mask is None:
            return
        length = self.node.meta["val"].shape[-2]
        lower = torch.ones(length, length, dtype=torch.bool).tril()
        if isinstance(mask, fx.Node):
            value = evaluate(self.graph, mask, {})
            allowed = value if value.dtype == torch.bool else value == 0
            negligible = value.dtype == torch.bool or bool((value[~allowed] < -1e4).all())
            square = allowed.expand(*allowed.shape[:-2], length, length).reshape(-1, length, length)
            if negligible and bool((square == lower).all()):
                return
        raise export_error(
            "attention is not causal over all earlier tokens, or its mask adds a bias",
            self.node,
            "The checkpoint format stands for plain causal attention.",
        )

    def _operand(self, name: str) -> tuple[Tensor, Tensor | None]:
        """(row of the projection for each head and dim, angles of the rotary embedding)."""
        operand = self.given[name]
        assert isinstance(operand, fx.Node)
        read = sources(operand, self.found.all())
        if len(read) != 1 or read[0] not in self.found.linear:
            raise export_error(f"its {name} is not one projection, reshaped and rotated", self.node)
        (projection,) = read
        outputs = self.found.linear[projection].outputs

        def run(row_values: Tensor) -> Tensor:
            shape = projection.meta["val"].shape
            given = {projection: row_values.expand(shape)}
            return evaluate(self.graph, operand, given)[0]

        by_position = run(torch.arange(outputs, dtype=torch.float64))
        exact = by_position[:, 0]
        rows = exact.round().long()
        if not torch.equal(rows.double(), exact) or not bool(
            ((rows >= 0) & (rows < outputs)).all()
        ):
            raise export_error(f"its {name} is not made of rows of its projection", self.node)
        if bool((by_position == exact.unsqueeze(1)).all()):
            return rows, None
        head = rows[0]

        def rotated(values: Tensor) -> Tensor:
            spread = torch.zeros(outputs, dtype=torch.float64)
            spread[head] = values
            return run(spread)[0]

        turned = angles(rotated, len(head))
        if turned is None:
            raise export_error(
                f"its {name} depends on the position otherwise than by a rotary embedding over "
                f"the two halves of all {len(head)} dims",
                self.node,
            )
        return rows, turned

    def _grouped(self, rows: Tensor, kv_heads: int, heads: int) -> Tensor:
        """The rows of each distinct head, where consecutive query heads share one."""
        distinct = rows[:: rows.shape[0] // kv_heads]
        if rows.shape[0] not in (kv_heads, heads) or not torch.equal(
            distinct.repeat_interleave(rows.shape[0] // kv_heads, 0), rows
        ):
            raise export_error(
                "query heads do not share key heads in consecutive groups", self.node
            )
        return distinct

    def _linear(self, name: str, rows: Tensor) -> Linear:
        operand = self.given[name]
        assert isinstance(operand, fx.Node)
        (projection,) = sources(operand, self.found.all())
        return replace(self.found.linear[projection], rows=rows.flatten())

    def _order(self, dense: fx.Node, width: int) -> None:
        """The dense projection must read head 0, head 1, ... with their dims in order."""
        shape = self.node.meta["val"].shape
        by_head = torch.arange(width, dtype=torch.float64).view(1, shape[1], 1, shape[3])
        given = {self.node: by_head.expand(shape)}
        read = evaluate(self.graph, self.found.inputs[dense], given)
        if not bool((read == torch.arange(width)).all()):
            raise export_error("does not read the heads of attention in order", dense)


def _heads(rows: Tensor) -> int:
    """The number of distinct heads."""
    return len(torch.unique(rows, dim=0))


def _same(left: Tensor | None, right: Tensor | None) -> bool:
    if left is None or right is None:
        return left is right
    return torch.allclose(left, right, rtol=1e-6, atol=0)
