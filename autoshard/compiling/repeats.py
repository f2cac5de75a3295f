"""A rank's program is traced, and cut in two, by five of its equal layers (capture/five_layers.py).

Not done, the graph is traced whole: where `capture/five_layers.py` says so; gradients that are
accumulated in inputs; operators that write, or have graphs of their own.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import fx

from autoshard.capture import (
    EqualLayers,
    Growth,
    equal_layers,
    layouts_of,
    short_form,
    symbols,
    unmark,
    writes,
)
from autoshard.compiling.debugging import EQUAL_LAYERS, settings
from autoshard.runtime.compat import Graphs, Short, Unequal, real_tensors
from autoshard.runtime.graph_meta import HOST, PENDING_INPUTS

T = TypeVar("T")


def traced(gm: fx.GraphModule, trace: Callable[[Short | None], T]) -> T:
    """What `trace` makes of a graph by its short form, or, where that does not do, without."""
    short = None if EQUAL_LAYERS in settings().left_out else shortened(gm)
    if short is not None:
        with contextlib.suppress(Unequal):
            return trace(short)
    return trace(None)


def shortened(gm: fx.GraphModule) -> Short | None:
    """A graph with five of its equal layers, all inputs kept; None where there are few."""
    given = gm.graph.find_nodes(op="placeholder")
    nodes = [n for n in gm.graph.nodes if n.op not in ("placeholder", "output")]
    values = [n.meta.get("val") for n in given]
    trained = any(isinstance(val, torch.Tensor) and val.requires_grad for val in values)
    if not trained or any(map(symbols, values)) or gm.meta.get(PENDING_INPUTS):
        return None
    runs = equal_layers(gm, _is_pure)
    number = {node: i for i, node in enumerate((*given, *nodes))}
    firsts = [[layer[0], *own] for run in runs for layer, own in zip(*run)]

    def grow(joint: fx.Graph, cut: Callable[[], Graphs] | None = None) -> Graphs:
        placeholders = joint.find_nodes(op="placeholder")
        primals = [node for node in placeholders if "primals" in node.name]
        inputs = primals[len([*short.parameters(), *short.buffers()]) :]  # those come first
        called = [node.target for node in joint.nodes if node.op == "call_function"]
        results: Any = joint.output_node().args[0]
        outputs = len(results) - len(primals)
        whole = len(inputs) == len(given) and len(primals) < len(placeholders)  # has gradients
        alike = cut is None or all(map(_are_kept_alike, runs))
        if not whole or not alike or not all(map(_is_operator, called)):
            raise Unequal
        layouts = layouts_of(joint, inputs, outputs, gm, runs)
        made = () if cut is None else cut()
        graphs = [each.graph for each in made] or [joint]
        with real_tensors():
            for layout in layouts:
                grown = None
                for graph in graphs:
                    grown = Growth(layout, graph, bool(made), grown)
                    grown.grow()
        for graph in graphs:
            unmark(graph)
        return made

    key = str([[number[node] for node in each] for each in firsts])
    return Short(short := short_form(gm, runs), grow, key) if runs else None


def _are_kept_alike(run: EqualLayers) -> bool:
    """Whether what is kept for backward of one layer is kept of all that are copied."""

    def told(node: fx.Node) -> Any:
        return node.meta.get("recompute"), node.meta.get("custom", {}).get(HOST)

    return all(len({*map(told, nodes)}) == 1 for nodes in zip(*run.layers[1:-2]))


def _is_operator(target: Any) -> bool:
    return hasattr(target, "_schema") or target is operator.getitem


def _is_pure(node: fx.Node) -> bool:
    """Whether a node writes to nothing, or is one of ours, of which the joint graph shows it."""
    ours = getattr(node.target, "__module__", "").startswith("autoshard.")
    known = node.op == "call_function" and (ours or _is_operator(node.target))
    return known and not writes(node.target) and not symbols(node.meta.get("val"))
