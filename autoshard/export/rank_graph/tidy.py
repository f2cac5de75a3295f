"""A rank graph after decomposition, made plain: values on the CPU, sizes from the inputs, nothing
that does nothing."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

aten = torch.ops.aten
_c10d = torch.ops._c10d_functional

_COPIES = (
    *(aten.clone.default, aten.alias.default, aten.detach.default, aten.contiguous.default),
    *(aten.lift_fresh_copy.default, aten.lift_fresh.default, _c10d.wait_tensor.default),
)
_OPTIONS = ("device", "layout", "pin_memory", "memory_format", "non_blocking")


def on_cpu(gm: fx.GraphModule, mode: Any) -> list[Any]:
    """Take every device out of the nodes of `gm`; the placeholders' values, on the CPU."""
    values = []
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            val = node.meta["val"]
            if isinstance(val, torch.Tensor):
                with mode:
                    val = torch.empty(val.shape, dtype=val.dtype)
            values.append(val)
        elif node.op == "call_function" and "device" in node.kwargs:
            node.kwargs = {k: v for k, v in node.kwargs.items() if k != "device"}
    gm.recompile()
    return values


def tidy(gm: fx.GraphModule, inputs: set[str]) -> None:
    """Rewrite `gm.graph` in place.

    inputs: targets of the placeholders that the caller gives, which tell the symbolic sizes.
    """
    graph = gm.graph
    sizes_from_inputs(graph, inputs)
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        node.kwargs = {k: v for k, v in node.kwargs.items() if k not in _OPTIONS}
        if node.target in _COPIES or _keeps_value(node):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    graph.eliminate_dead_code()


def propagate(gm: fx.GraphModule, mode: Any) -> None:
    """Compute `meta["val"]` of every node that has none, or that reads one whose shape changed."""
    changed: set[fx.Node] = set()
    with mode, torch.no_grad():
        for node in gm.graph.nodes:
            if node.op != "call_function":
                continue
            before = node.meta.get("val")
            if before is not None and not any(n in changed for n in node.all_input_nodes):
                continue
            args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: n.meta["val"])
            node.meta["val"] = val = node.target(*args, **kwargs)
            if before is None or not _same(before, val):
                changed.add(node)


def _same(before: Any, after: Any) -> bool:
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
        return False
    return before.dtype == after.dtype and str(before.shape) == str(after.shape)


def sizes_from_inputs(graph: fx.Graph, inputs: set[str]) -> None:
    """Let each symbolic size be that of the first of these inputs which has it."""
    placeholders = graph.find_nodes(op="placeholder")
    known: dict[str, fx.Node] = {}
    last = placeholders[-1]
    for node in reversed(placeholders):
        if node.target not in inputs:
            continue
        for dim, extent in enumerate(node.meta["val"].shape):
            if isinstance(extent, int) or str(extent) in known:
                continue
            with graph.inserting_after(last):
                size = graph.call_function(aten.sym_size.int, (node, dim))
            size.meta["val"] = extent
            known[str(extent)] = size
    for node in list(graph.nodes):
        val = node.meta.get("val")
        plain_size = isinstance(val, torch.SymInt) and str(val) in known
        if plain_size and known[str(val)] is not node:
            node.replace_all_uses_with(known[str(val)])
            if node.op == "placeholder" or not node.users:
                graph.erase_node(node)


def _keeps_value(node: fx.Node) -> bool:
    """Whether a node has the value of its first operand, whose memory it need not leave alone."""
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node):
        return False
    val, have = node.meta.get("val"), source.meta.get("val")
    if not isinstance(val, torch.Tensor) or not isinstance(have, torch.Tensor):
        return False
    if node.target is aten._to_copy.default:
        return val.dtype == have.dtype
    if node.target in (aten.add.Tensor, aten.mul.Tensor, aten.div.Tensor):
        nothing = 0 if node.target is aten.add.Tensor else 1
        other = node.args[1]
        plain = isinstance(other, (int, float)) and other == nothing
        return plain and val.dtype == have.dtype
    if node.target in (aten.expand.default, aten.reshape.default, aten.slice.Tensor):
        step = node.args[4] if node.target is aten.slice.Tensor and len(node.args) > 4 else 1
        return bool(step == 1) and [str(e) for e in val.shape] == [str(e) for e in have.shape]
    return False
