"""Regions of torch.func transforms (vmap, grad, jvp) in Dynamo's graph, replaced by ATen operators.

A transform works on tensors of its own, which a pre-dispatch trace cannot see through. So each
outermost region, from the node that opens a level to the one that closes it, is traced by itself
to the operators it runs, and these take its place. What is left has no transform.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from autoshard.runtime.compat import FakeTensor, FakeTensorMode
from autoshard.runtime.errors import CaptureError, source_line

_KEPT_META = ("stack_trace", "nn_module_stack", "custom")


def inline_transforms(
    gm: fx.GraphModule, inputs: list[Any], mode: FakeTensorMode
) -> fx.GraphModule:
    """`gm` itself where it has no transform, else a copy with the operators of each.

    inputs: the fake value of each placeholder.
    """
    nodes = list(gm.graph.nodes)
    if not any(_level(node) for node in nodes):
        return gm
    given = dict(zip((node for node in nodes if node.op == "placeholder"), inputs))
    root = nn.Module()
    root.__dict__.update(gm.__dict__)
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    position = 0
    while position < len(nodes):
        end = _end(nodes, position)
        if end is None:
            env[nodes[position]] = graph.node_copy(nodes[position], env.__getitem__)
            position += 1
            continue
        region = nodes[position : end + 1]
        for outer, value in _splice(graph, root, gm, region, given, env, mode):
            env[outer] = value
        position = end + 1
    return fx.GraphModule(root, graph)


def _level(node: fx.Node) -> int:
    """1 where a node opens a level of a transform, -1 where it closes one, else 0."""
    name = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
    if name.endswith("_increment_nesting"):
        return 1
    return -1 if name.endswith("_decrement_nesting") else 0


def _end(nodes: list[fx.Node], start: int) -> int | None:
    """The position of the node that closes the level opened at `start`, if one is opened there."""
    depth = 0
    for position in range(start, len(nodes)):
        depth += _level(nodes[position])
        if depth == 0:
            return position if position > start else None
    return None


def _splice(
    graph: fx.Graph,
    root: nn.Module,
    gm: fx.GraphModule,
    region: list[fx.Node],
    given: dict[fx.Node, Any],
    env: dict[fx.Node, fx.Node],
    mode: FakeTensorMode,
) -> list[tuple[fx.Node, fx.Node]]:
    """Append the operators of a region to `graph`; (node of the region, its new node) of those
    read outside."""
    inside = set(region)
    outer = list(
        dict.fromkeys(o for node in region for o in node.all_input_nodes if o not in inside)
    )
    read = [node for node in region if any(user not in inside for user in node.users)]
    body = fx.Graph()
    local = {node: body.placeholder(node.name) for node in outer}
    for node in region:
        local[node] = body.node_copy(node, local.__getitem__)
    body.output([local[node] for node in read])
    values = [_value(node, given) for node in outer]
    try:
        traced = _trace(fx.GraphModule(gm, body), values, mode)
    except Exception as error:
        what = f"cannot capture a torch.func transform: {type(error).__name__}: {error}"
        raise CaptureError(what, where=source_line(region[0].stack_trace)) from error
    placeholders = traced.graph.find_nodes(op="placeholder")
    new = {node: env[source] for node, source in zip(placeholders, outer)}
    for node in traced.graph.nodes:
        if node.op == "get_attr":
            name = f"{node.target}_{region[0].name}"
            setattr(root, name, getattr(traced, node.target))
            new[node] = graph.get_attr(name)
        elif node.op == "call_function":
            new[node] = graph.node_copy(node, new.__getitem__)
            new[node].meta = {k: node.meta[k] for k in _KEPT_META if k in node.meta}
            new[node].meta["example_value"] = node.meta.get("val")
    results: Any = traced.graph.output_node().args[0]
    return [(node, new[result]) for node, result in zip(read, results)]


def _value(node: fx.Node, given: dict[fx.Node, Any]) -> Any:
    value = given.get(node, node.meta.get("example_value"))
    return value.detach() if isinstance(value, FakeTensor) else value


def _trace(body: fx.GraphModule, values: list[Any], mode: FakeTensorMode) -> fx.GraphModule:
    run: Callable[..., Any] = fx.Interpreter(body).run
    # A region may differentiate by itself; the caller's grad mode is not its own.
    with mode, torch.enable_grad(), fx.traceback.preserve_node_meta():
        return make_fx(run)(*values)
