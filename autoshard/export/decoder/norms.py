"""Norms of a graph: layer_norm and rms_norm, as one operator or written out."""

from __future__ import annotations

import torch
from torch import fx

from autoshard.export.decoder.probing import moved, parameter_of
from autoshard.export.decoder.structure import Norm
from autoshard.export.errors import export_error
from autoshard.export.serial_graph import ModelGraph

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
        rms = _rms(moved(scaled))
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
    given = dict(zip([a.name for a in node.target._schema.arguments], node.args))  # type: ignore[union-attr]
    given.update(node.kwargs)
    weight = parameter_of(graph, given.get("weight"))
    bias = parameter_of(graph, given.get("bias"))
    if weight is None:
        raise export_error("a norm without weight has no place in the checkpoint", node)
    kind = "layer" if node.target is aten.layer_norm.default else "rms"
    eps = given.get("eps")
    if eps is None:
        eps = 1e-5 if kind == "layer" else torch.finfo(node.meta["val"].dtype).eps
    source = given["input"]
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


def _rms(node: object) -> tuple[fx.Node, float] | None:
    """(x, eps) of x * rsqrt(mean(x * x) + eps), however it is spelled."""
    if not isinstance(node, fx.Node) or len(node.args) < 2:
        return None
    left, right = node.args[:2]
    if node.target is aten.div.Tensor:
        pairs = [(left, _root(right, (aten.sqrt.default,)))]
    elif node.target is aten.mul.Tensor:
        roots = (aten.rsqrt.default,)
        pairs = [(left, _root(right, roots)), (right, _root(left, roots))]
    else:
        return None
    for x, mean in pairs:
        if mean is None or not isinstance(x, fx.Node):
            continue
        for square, eps in (mean.args[:2], reversed(mean.args[:2])):
            if isinstance(eps, float) and _is_mean_square(square, x):
                source = moved(x)
                assert isinstance(source, fx.Node)
                return source, eps
    return None


def _root(node: object, roots: tuple[object, ...]) -> fx.Node | None:
    """The sum under a root, or under a power of -0.5."""
    if not isinstance(node, fx.Node):
        return None
    power = node.target is aten.pow.Tensor_Scalar and node.args[1] == -0.5
    inner = node.args[0] if node.target in roots or power else None
    adds = (aten.add.Tensor, aten.add.Scalar)
    return inner if isinstance(inner, fx.Node) and inner.target in adds else None


def _is_mean_square(node: object, x: fx.Node) -> bool:
    if not isinstance(node, fx.Node) or node.target is not aten.mean.dim:
        return False
    square, dims = node.args[:2]
    if not isinstance(square, fx.Node) or dims not in ([-1], [x.meta["val"].dim() - 1]):
        return False
    if square.target is aten.pow.Tensor_Scalar:
        return square.args == (x, 2)
    if square.target is aten.square.default:
        return square.args == (x,)
    return square.target is aten.mul.Tensor and square.args == (x, x)
