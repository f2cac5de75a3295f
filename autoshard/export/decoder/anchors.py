"""The nodes of a decoder's graph that hold parameters, projections, norms, embeddings; and its
attentions: where each is, and what it reads.

Everything between two of them is parameter-free and is told by what it computes (probing.py).

Norms of a graph: layer_norm and rms_norm, as one operator or written out.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx

from autoshard.export.decoder.probing import (
    MOVES,
    SWAPS,
    close,
    evaluate,
    moved,
    parameter_of,
    sources,
)
from autoshard.export.decoder.structure import Linear, Norm
from autoshard.export.errors import ExportError, export_error
from autoshard.export.serial_graph import ModelGraph
from autoshard.planning import arguments

aten = torch.ops.aten

_VALUES = (aten.mul.Tensor, aten.mul.Scalar)


def read_norm(graph: ModelGraph, node: fx.Node) -> tuple[Norm, fx.Node, tuple[fx.Node, ...]] | None:
    """(norm, its input, the nodes that use its parameters) at the last node of a norm."""
    if node.target in (aten.layer_norm.default, aten.rms_norm.default):
        return _whole_norm(graph, node)
    if node.target not in _VALUES or len(node.all_input_nodes) != 2:
        return None
    for weight, scaled in (node.args[:2], reversed(node.args[:2])):
        found = _norm_weight(graph, weight)
        if found is None or not isinstance(scaled, fx.Node):
            continue
        rms = _rms(graph, moved(scaled))
        if rms is not None:
            placeholder, zero_centred, uses = found
            norm = Norm(
                kind="rms",
                weight=graph.parameters[placeholder],
                bias=None,
                eps=rms[1],
                zero_centred=zero_centred,
                node=node,
            )
            return norm, rms[0], (node, *uses)
    return None


def _whole_norm(graph: ModelGraph, node: fx.Node) -> tuple[Norm, fx.Node, tuple[fx.Node, ...]]:
    given = arguments(node)
    weight = parameter_of(graph, given["weight"])
    bias = parameter_of(graph, given.get("bias"))
    if weight is None:
        raise export_error("a norm without weight has no place in the checkpoint", node)
    kind = "layer" if node.target is aten.layer_norm.default else "rms"
    eps, source = given["eps"], given["input"]
    if eps is None:
        eps = torch.finfo(node.meta["val"].dtype).eps
    assert isinstance(source, fx.Node) and isinstance(eps, float)
    norm = Norm(
        kind=kind,
        weight=graph.parameters[weight[0]],
        bias=None if bias is None else graph.parameters[bias[0]],
        eps=eps,
        zero_centred=False,
        node=node,
    )
    return norm, source, (node,)


def _norm_weight(
    graph: ModelGraph, node: object
) -> tuple[fx.Node, bool, tuple[fx.Node, ...]] | None:
    """(placeholder, whether 1 is added, users) of a value that is a norm's weight."""
    parameter = parameter_of(graph, node)
    if parameter is not None:
        return (parameter[0], False, ()) if parameter[0].meta["val"].dim() == 1 else None
    node = moved(node)
    if not isinstance(node, fx.Node) or node.target not in (aten.add.Tensor, aten.add.Scalar):
        return None
    for one, other in (node.args[:2], reversed(node.args[:2])):
        parameter = parameter_of(graph, other)
        if parameter is not None and one in (1, 1.0) and parameter[0].meta["val"].dim() == 1:
            return parameter[0], True, (node,)
    return None


def _rms(graph: ModelGraph, node: object) -> tuple[fx.Node, float] | None:
    """(x, eps) of x * rsqrt(mean(x * x) + eps), however it is spelled: told by its values."""
    if not isinstance(node, fx.Node) or node.target not in (aten.div.Tensor, aten.mul.Tensor):
        return None
    for x in node.all_input_nodes:
        shape = x.meta["val"].shape
        values = torch.linspace(0.5, 1.5, shape.numel(), dtype=torch.float64).view(shape)
        small = torch.full_like(values, 2**-10)  # an eps of 1e-12 counts beside its square
        try:
            scaled, result = (evaluate(graph, node, {x: given}) for given in (small, values))
        except ExportError:  # it reads something else
            continue
        eps = float(f"{((small / scaled).square() - small.square()).flatten()[0]:.8g}")
        expected = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
        if eps > 0 and close(result, expected, 1e-9):
            source = moved(x)
            assert isinstance(source, fx.Node)
            return source, eps
    return None


ATTENTION = aten.scaled_dot_product_attention.default
_SOFTMAXES = (aten.softmax.int, aten._softmax.default)
_OF_SCORES = (aten.matmul.default, aten.bmm.default)


@dataclass(frozen=True)
class AttentionSite:
    """The operands of one attention, and the node of its result, (.., heads, tokens, head_dim).

    turned: keys have their last dims swapped. product, softmax: the nodes of a written-out one.
    """

    node: fx.Node
    query: fx.Node
    key: fx.Node
    value: fx.Node
    turned: bool = False
    product: fx.Node | None = None
    softmax: fx.Node | None = None

    def scores(self, graph: ModelGraph, product: float) -> Tensor:
        """What goes into the softmax, [.., tokens, tokens], where every query times every key is
        `product`. -inf, or about it, where a token may not look."""
        if self.product is None or self.softmax is None:
            return self._scores_of_operator(graph, product)
        shape = self.product.meta["val"].shape
        values = torch.full(shape, product, dtype=torch.float64)
        if self.product.target is aten.baddbmm.default:
            given = self.product.kwargs
            added = evaluate(graph, self.product.args[0], {})  # type: ignore[arg-type]
            alpha, beta = (float(given.get(name, 1)) for name in ("alpha", "beta"))  # type: ignore[arg-type]
            values = alpha * values + beta * added
        return evaluate(graph, self.softmax.args[0], {self.product: values})  # type: ignore[arg-type]

    def _scores_of_operator(self, graph: ModelGraph, product: float) -> Tensor:
        given = arguments(self.node)
        length, head_dim = self.query.meta["val"].shape[-2:]
        scale = given.get("scale")
        scores = torch.full((length, length), product, dtype=torch.float64)
        scores *= head_dim**-0.5 if scale is None else scale
        if given.get("is_causal"):
            later = torch.ones(length, length, dtype=torch.bool).triu(1)
            scores = scores.masked_fill(later, -torch.inf)
        mask = given.get("attn_mask")
        if mask is None:
            return scores
        bias = evaluate(graph, mask, {})
        if bias.dtype == torch.bool:
            bias = torch.zeros(bias.shape, dtype=torch.float64).masked_fill(~bias, -torch.inf)
        return scores + bias


def attention_at(
    graph: ModelGraph, node: fx.Node, anchors: Mapping[fx.Node, Any]
) -> AttentionSite | None:
    """The attention whose result is `node`, or None. anchors: those before it."""
    if node.target is ATTENTION:
        given = arguments(node)
        return AttentionSite(node, given["query"], given["key"], given["value"])
    if node.target not in _OF_SCORES or any(parameter_of(graph, one) for one in node.args):
        return None
    weights, value = node.args[:2]
    softmaxes = {n: None for n in graph.nodes if n.target in _SOFTMAXES}
    read = sources(weights, {**anchors, **softmaxes})  # type: ignore[arg-type]
    if len(read) != 1 or read[0] not in softmaxes or not isinstance(value, fx.Node):
        return None
    products = {
        n: None
        for n in graph.nodes
        if n.target in (*_OF_SCORES, aten.baddbmm.default) and n not in anchors
    }
    scores = sources(read[0].args[0], {**anchors, **products})  # type: ignore[arg-type]
    if len(scores) != 1 or scores[0] not in products or not _passes(graph, weights, read[0]):
        return None
    (product,) = scores
    query, key = product.args[-2:]
    assert isinstance(query, fx.Node) and isinstance(key, fx.Node)
    return AttentionSite(node, query, key, value, True, product, read[0])


def _passes(graph: ModelGraph, node: Any, softmax: fx.Node) -> bool:
    """Whether `node` is the result of the softmax, reshaped or cast at most."""
    values = torch.rand(softmax.meta["val"].shape, dtype=torch.float64)
    return torch.equal(evaluate(graph, node, {softmax: values}).flatten(), values.flatten())


_PRODUCTS = (aten.mm.default, aten.matmul.default)


@dataclass(frozen=True)
class Embedding:
    """A lookup in a table. table: name of the parameter. index: the node of the indices."""

    table: str
    index: fx.Node
    rows: int
    columns: int


@dataclass
class Anchors:
    """Where each node that holds parameters is, and of what kind."""

    linear: dict[fx.Node, Linear] = field(default_factory=dict)
    inputs: dict[fx.Node, fx.Node] = field(default_factory=dict)
    norm: dict[fx.Node, Norm] = field(default_factory=dict)
    normed: dict[fx.Node, fx.Node] = field(default_factory=dict)
    embedding: dict[fx.Node, Embedding] = field(default_factory=dict)
    attention: dict[fx.Node, AttentionSite] = field(default_factory=dict)

    def all(self) -> Mapping[fx.Node, object]:
        """Every anchor."""
        return {**self.linear, **self.norm, **self.embedding, **self.attention}


def find_anchors(graph: ModelGraph) -> Anchors:
    """The anchors of a graph. Raises ExportError where a parameter has a use that is none."""
    found = Anchors()
    claimed: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if (site := attention_at(graph, node, found.all())) is not None:
            found.attention[node] = site
        elif node.target is aten.embedding.default:
            _embedding(graph, node, found, claimed)
        elif (norm := read_norm(graph, node)) is not None:
            found.norm[node], found.normed[node] = norm[0], norm[1]
            claimed.update(norm[2])
        elif (linear := _linear(graph, node)) is not None:
            last = _biased(graph, node, linear, found)
            claimed.update((node, last))
    _check(graph, claimed)
    return found


def _embedding(graph: ModelGraph, node: fx.Node, found: Anchors, claimed: set[fx.Node]) -> None:
    table = parameter_of(graph, node.args[0])
    index = node.args[1]
    assert isinstance(index, fx.Node)
    if table is None:
        raise export_error("an embedding whose table is not a parameter", node)
    rows, columns = table[0].meta["val"].shape
    found.embedding[node] = Embedding(graph.parameters[table[0]], index, rows, columns)
    claimed.add(node)


def _linear(graph: ModelGraph, node: fx.Node) -> tuple[fx.Node, Linear] | None:
    """(input, Linear) of a node that multiplies by a parameter, (.., in) @ (.., in, out)."""
    bias, dims = None, (2, 3)
    if node.target is aten.linear.default:
        x, weight = node.args[:2]
        bias = node.args[2] if len(node.args) > 2 else node.kwargs.get("bias")
        out_first = True
    elif node.target is aten.addmm.default:
        bias, x, weight = node.args[:3]
        out_first = False
        if node.kwargs.get("alpha", 1) != 1 or node.kwargs.get("beta", 1) != 1:
            return None
    elif node.target in _PRODUCTS or (len(node.args) > 1 and "mm" in str(node.target)):
        x, weight = node.args[:2]
        out_first = False
        if node.target not in _PRODUCTS:  # rows by one of a stack of matrices
            dims = (3, 3)
    else:
        return None
    parameter = parameter_of(graph, weight)
    if parameter is None or not isinstance(x, fx.Node):
        return None
    placeholder, swapped = parameter
    shape = placeholder.meta["val"].shape
    if len(shape) not in dims:
        return None
    transposed = swapped if out_first else not swapped
    outputs, inputs = (shape[-1], shape[-2]) if transposed else (shape[-2], shape[-1])
    bias_node = None if bias is None else parameter_of(graph, bias)
    if bias is not None and bias_node is None:
        raise export_error("its bias is not a parameter", node)
    name = None if bias_node is None else graph.parameters[bias_node[0]]
    return x, Linear(
        weight=graph.parameters[placeholder],
        bias=name,
        transposed=transposed,
        outputs=outputs,
        inputs=inputs,
        node=node,
    )


def _biased(
    graph: ModelGraph, node: fx.Node, linear: tuple[fx.Node, Linear], found: Anchors
) -> fx.Node:
    """Record a projection, at the addition of its bias where that is a node of its own."""
    x, one = linear
    last = node
    if one.bias is None and len(node.users) == 1 and one.node.meta["val"].shape[-1] == one.outputs:
        (user,) = node.users
        others = [n for n in user.all_input_nodes if n is not node]
        if user.target is aten.add.Tensor and len(others) == 1 and len(user.kwargs) == 0:
            bias = parameter_of(graph, others[0])
            if bias is not None and tuple(bias[0].meta["val"].shape) == (one.outputs,):
                one, last = replace(one, bias=graph.parameters[bias[0]]), user
    found.linear[last], found.inputs[last] = one, x
    return last


def _check(graph: ModelGraph, claimed: set[fx.Node]) -> None:
    """No parameter may have a use that no anchor stands for: the format could not express it."""
    for placeholder, name in graph.parameters.items():
        todo = list(placeholder.users)
        while todo:
            user = todo.pop()
            if user in claimed:
                continue
            if user.target in MOVES or user.target in SWAPS:
                todo += user.users
                continue
            raise export_error(
                f"uses parameter {name} in a way the checkpoint format has no place for", user
            )
