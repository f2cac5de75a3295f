"""A graph of equal layers that is traced with five of them; `growth.py` adds the others.

    given                                traced
    %x1 = layer(%x0, %w0)                %x1 = layer(%x0, %w0)
    %x2 = layer(%x1, %w1)                %x2 = layer(%x1, %w1)
    %x3 = layer(%x2, %w2)                %x3 = layer(%x2, %w2)
    %x4 = layer(%x3, %w3)                %x6 = layer(%x3, %w5)
    %x5 = layer(%x4, %w4)                %x7 = layer(%x6, %w6)
    %x6 = layer(%x5, %w5)
    %x7 = layer(%x6, %w6)

Not done, the graph is traced whole: fewer than seven equal layers; a layer whose values are read
behind the next one; gradients that are accumulated in inputs; sizes that are symbols; operators
that write, or have graphs of their own; what is interleaved so that two layers come out unequal.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import fx

from autoshard.compiling.debugging import EQUAL_LAYERS, settings
from autoshard.compiling.growth import ELSEWHERE, SECOND, EqualLayers, Growth, JointLayers
from autoshard.compiling.stretches import (
    described,
    label,
    symbols,
    tandem_repeats,
    tensors_of,
    writes,
)
from autoshard.runtime.compat import Graphs, Short, Unequal, real_tensors
from autoshard.runtime.graph_meta import COPY, HOST, PENDING_INPUTS

_FEWEST = SECOND + 5  # fewer are traced: 0, 1, 2 and the last two, which may differ, are

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
    runs = []
    for start, period, count in tandem_repeats([label(node) for node in nodes]):
        layers = [nodes[start + i * period :][:period] for i in range(count)]
        own = _own(layers) if count >= _FEWEST else None
        if own is not None:
            runs.append(EqualLayers(layers, own))
    number = {node: i for i, node in enumerate((*given, *nodes))}
    firsts = [[layer[0], *own] for run in runs for layer, own in zip(*run)]

    def grow(joint: fx.Graph, cut: Callable[[], Graphs] | None = None) -> Graphs:
        placeholders = joint.find_nodes(op="placeholder")
        primals = [node for node in placeholders if "primals" in node.name]
        inputs = primals[len([*short.parameters(), *short.buffers()]) :]  # those come first
        called = [node.target for node in joint.nodes if node.op == "call_function"]
        whole = len(inputs) == len(given) and len(primals) < len(placeholders)  # has gradients
        alike = cut is None or all(map(_are_kept_alike, runs))
        if not whole or not alike or not all(map(_is_operator, called)):
            raise Unequal
        marks = {n.name: n.meta.get("custom", {}).get(COPY) for n in joint.nodes}
        origin = {name: nodes[mark] for name, mark in marks.items() if mark is not None}
        order = {node.name: i for i, node in enumerate(joint.nodes)}
        layouts = [JointLayers(joint, dict(zip(given, inputs)), origin, order, run) for run in runs]
        made = () if cut is None else cut()
        graphs = [each.graph for each in made] or [joint]
        with real_tensors():
            for layout in layouts:
                grown = None
                for graph in graphs:
                    grown = Growth(layout, graph, bool(made), grown)
                    grown.grow()
        for node in itertools.chain.from_iterable(graph.nodes for graph in graphs):
            if COPY in node.meta.get("custom", {}):
                custom = {k: v for k, v in node.meta.pop("custom").items() if k != COPY}
                if custom:
                    node.meta["custom"] = custom
        return made

    key = str([[number[node] for node in each] for each in firsts])
    return Short(short := _short(gm, runs), grow, key) if runs else None


def _are_kept_alike(run: EqualLayers) -> bool:
    """Whether what is kept for backward of one layer is kept of all that are copied."""

    def told(node: fx.Node) -> Any:
        return node.meta.get("recompute"), node.meta.get("custom", {}).get(HOST)

    return all(len({*map(told, nodes)}) == 1 for nodes in zip(*run.layers[1:-2]))


def _own(layers: Sequence[Sequence[fx.Node]]) -> list[list[fx.Node]] | None:
    """The inputs that each layer alone reads; None where a layer after 1 does not read as it."""
    if not all(map(_is_pure, layers[0])):
        return None
    home = {node: (k, i) for k, nodes in enumerate(layers) for i, node in enumerate(nodes)}
    found: list[list[fx.Node]] = [[]]
    for k in range(SECOND, len(layers)):
        pairs: dict[fx.Node, fx.Node] = {}
        for one, other in zip(layers[k - 1], layers[k]):
            reads, theirs = one.all_input_nodes, other.all_input_nodes
            if label(one, reads.index) != label(other, theirs.index):
                return None
            for a, b in zip(reads, theirs):
                if a in home:
                    layer, i = home[a]
                    if layer < k - 2 or home.get(b) != (layer + 1, i):
                        return None
                elif a is not b and (pairs.setdefault(a, b) is not b or not _are_alike(a, b)):
                    return None
        found += [list(pairs)] if k == SECOND else []
        if found[-1] != list(pairs) or len(set(pairs.values())) != len(pairs):
            return None
        found.append(list(pairs.values()))
    for k, (nodes, own) in enumerate(zip(layers, found)):
        users, readers = (
            {home.get(user, ELSEWHERE)[0] for node in each for user in node.users}
            for each in (own, nodes)
        )
        if not users <= {k} or (0 < k < len(layers) - 1 and not readers <= {k, k + 1}):
            return None
    return found


def _are_alike(a: fx.Node, b: fx.Node) -> bool:
    """Whether two inputs are tensors of equal metadata."""
    values = [value for node in (a, b) if node.op == "placeholder" for value in tensors_of(node)]
    told = {(type(val), described(val, True), val.requires_grad) for val in values}
    return len(values) == 2 and len(told) == 1


def _is_operator(target: Any) -> bool:
    return hasattr(target, "_schema") or target is operator.getitem


def _is_pure(node: fx.Node) -> bool:
    """Whether a node writes to nothing, or is one of ours, of which the joint graph shows it."""
    ours = getattr(node.target, "__module__", "").startswith("autoshard.")
    known = node.op == "call_function" and (ours or _is_operator(node.target))
    return known and not writes(node.target) and not symbols(node.meta.get("val"))


def _short(gm: fx.GraphModule, runs: Sequence[EqualLayers]) -> fx.GraphModule:
    """The graph without the layers between 2 and the last two, each node marked by its number."""
    gone = {node for run in runs for layer in run.layers[SECOND + 1 : -2] for node in layer}
    second = {last: node for run in runs for last, node in zip(run.layers[-3], run.layers[SECOND])}
    graph, made, number = fx.Graph(), dict[fx.Node, fx.Node](), 0
    for node in gm.graph.nodes:
        if node not in gone:
            made[node] = graph.node_copy(node, lambda n: made[second.get(n, n)])
        if node in made and node.op not in ("placeholder", "output"):
            made[node].meta["custom"] = {**node.meta.get("custom", {}), COPY: number}
        number += node.op not in ("placeholder", "output")
    short = fx.GraphModule(gm, graph)
    short.meta = dict(gm.meta)
    return short
