"""float8_products: products of activations and parameters are computed in float8.

    before                                          after
    %x: f32[4,32]                                   %x: f32[4,32]
    %w: f32[16,32]                                  %w: f32[16,32]
    %b: f32[16]                                     %b: f32[16]
    %0: f32[4,16] = linear(%x, %w, %b)              %0: f32[4,16] = float8_linear(%x, %w, "float8")
                                                    %1: f32[4,16] = add(%0, %b)

Its operator computes both products of backward in float8 too. As torchao's users have it, the last
such product of a graph, which makes logits, keeps its dtype, and so does a weight with a dim that
is no multiple of 16, for which there is no kernel. Those that are left are in the report and in
`meta[FLOAT8]`, for `explain`.

Not done: graphs without gradients (evaluation, generation); grouped products of experts, products
of two activations, convolutions; weights gathered in float8 over the data-parallel axes.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx

from autoshard.passes.base import Context, Pass, Report, maker, replace, user_line
from autoshard.runtime.graph_meta import DIFF, FLOAT8, WITHOUT_GRADIENTS
from autoshard.runtime.operators import FLOAT8_LINEAR, FLOAT8_MULTIPLE

aten = torch.ops.aten
_NO_GRADIENT = "no gradient flows through it: evaluation is in the model's dtype"
_CASTS = (aten._to_copy.default, aten.to.dtype)


class ProductFound(NamedTuple):
    """A product of an activation and a parameter: in float8, or left as it is, and why."""

    reason: str
    where: str


class _Product(NamedTuple):
    """turned: whether the weight is [k, n], and is to be transposed."""

    x: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    turned: bool


@dataclass(frozen=True)
class Float8Products(Pass):
    """recipe: one of FLOAT8_RECIPES. parameters: the names of the placeholders that are ones."""

    recipe: str
    parameters: frozenset[str]

    def rewrite(self, gm: fx.GraphModule, ctx: Context, report: Report) -> None:
        found = Counter[ProductFound]()
        quiet = bool(gm.meta.get(WITHOUT_GRADIENTS))
        given = [(node, _product(node)) for node in gm.graph.nodes]
        nodes = [node for node, one in given if one and self._is_parameter(one.weight)]
        for node in nodes:
            one = _product(node)  # of what has taken the place of its operands
            assert one is not None
            reason = _NO_GRADIENT if quiet else _left(node, one, node is nodes[-1])
            found[ProductFound(reason, user_line(node) if reason else "")] += 1
            if reason:
                report.skip(node, reason)
            else:
                self._replace(gm.graph, node, one)
                report.hits += 1
        gm.meta[FLOAT8] = found

    def _is_parameter(self, weight: fx.Node) -> bool:
        while weight.target in _CASTS:
            weight = weight.args[0]  # type: ignore[assignment]
        return weight.op == "placeholder" and weight.name in self.parameters

    def _replace(self, graph: fx.Graph, node: fx.Node, one: _Product) -> None:
        weight, make = one.weight, maker(node, self.name, value=node)
        with graph.inserting_before(node):
            if one.turned:
                weight = maker(node, self.name)(aten.t.default, weight)
            new = make(FLOAT8_LINEAR, one.x, weight, self.recipe)
            if one.bias is not None:
                new = make(aten.add.Tensor, new, one.bias)
        replace(node, new)


def _product(node: fx.Node) -> _Product | None:
    """The operands of a product of two matrices."""
    args: Any = (*node.args, None)
    if node.target is aten.linear.default and not node.kwargs:
        return _Product(args[0], args[1], args[2], False)
    if node.target is aten.mm.default:
        return _Product(args[0], args[1], None, True)
    if node.target is aten.addmm.default and not node.kwargs:
        return _Product(args[1], args[2], args[0], True)
    return None


def _left(node: fx.Node, one: _Product, last: bool) -> str:
    """Why a product keeps its dtype; "" where it does not."""
    weight, x = one.weight.meta["val"], one.x.meta["val"]
    if not node.meta.get(DIFF):
        return _NO_GRADIENT
    if last:
        return "the last product makes logits"
    if weight.dim() != 2 or x.dim() < 2:
        return f"{x.dim()} dims by {weight.dim()}: no matrices"
    if any(size % FLOAT8_MULTIPLE for size in weight.shape):
        sizes = " x ".join(map(str, weight.shape))
        return f"weight of {sizes}: no multiples of {FLOAT8_MULTIPLE}"
    return ""
