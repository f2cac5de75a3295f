"""The nodes of a decoder's graph that hold parameters: projections, norms, embeddings.

Everything between two of them is parameter-free and is told by what it computes (probing.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from autoshard.export.decoder.norms import read_norm
from autoshard.export.decoder.parameter_uses import MOVES, SWAPS, parameter_of
from autoshard.export.decoder.sites import AttentionSite, attention_at
from autoshard.export.decoder.structure import Linear, Norm
from autoshard.export.errors import export_error
from autoshard.export.serial_graph import ModelGraph

aten = torch.ops.aten

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
    bias = None
    if node.target is aten.linear.default:
        x, weight = node.args[:2]
        bias = node.args[2] if len(node.args) > 2 else node.kwargs.get("bias")
        out_first = True
    elif node.target is aten.addmm.default:
        bias, x, weight = node.args[:3]
        out_first = False
        if node.kwargs.get("alpha", 1) != 1 or node.kwargs.get("beta", 1) != 1:
            return None
    elif node.target in _PRODUCTS or _is_grouped(graph, node):
        x, weight = node.args[:2]
        out_first = False
    else:
        return None
    parameter = parameter_of(graph, weight)
    if parameter is None or not isinstance(x, fx.Node):
        return None
    placeholder, swapped = parameter
    shape = placeholder.meta["val"].shape
    if len(shape) not in (2, 3):
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


def _is_grouped(graph: ModelGraph, node: fx.Node) -> bool:
    """Whether a node multiplies rows by one of a stack of matrices that is a parameter."""
    if len(node.args) < 2 or "mm" not in str(node.target):
        return False
    parameter = parameter_of(graph, node.args[1])
    return parameter is not None and parameter[0].meta["val"].dim() == 3


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
