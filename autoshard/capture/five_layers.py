"""A deep graph, by five of its equal layers; `growth.py` adds the others.

    given                                short
    %x1 = layer(%x0, %w0)                %x1 = layer(%x0, %w0)
    %x2 = layer(%x1, %w1)                %x2 = layer(%x1, %w1)
    %x3 = layer(%x2, %w2)                %x3 = layer(%x2, %w2)
    %x4 = layer(%x3, %w3)                %x6 = layer(%x3, %w5)
    %x5 = layer(%x4, %w4)                %x7 = layer(%x6, %w6)
    %x6 = layer(%x5, %w5)
    %x7 = layer(%x6, %w6)

Dynamo's graph is captured by its short form, and AOTAutograd traces a rank's program so. Not done:
fewer than seven equal layers; a layer whose values are read behind the next one; sizes that are
symbols; what is interleaved so that two layers come out unequal. Of a capture, moreover: layers
that hold an opaque operator, have a policy of checkpointing, or write to an input of their own.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx
from torch._ops import HigherOrderOperator

from autoshard.capture.growth import ELSEWHERE, SECOND, EqualLayers, Growth, JointLayers
from autoshard.capture.subgraphs import RegionPolicy
from autoshard.capture.tandem import described, label, symbols, tandem_repeats, tensors_of
from autoshard.runtime.compat import Unequal, real_tensors, without_code
from autoshard.runtime.graph_meta import COPY

_FEWEST = SECOND + 5  # fewer are traced: 0, 1, 2 and the last two, which may differ, are


def equal_layers(gm: fx.GraphModule, is_pure: Callable[[fx.Node], bool]) -> list[EqualLayers]:
    """The runs of equal layers in a graph, of operators of which each `is_pure`."""
    nodes = [n for n in gm.graph.nodes if n.op not in ("placeholder", "output")]
    runs = []
    for start, period, count in tandem_repeats([label(node) for node in nodes]):
        layers = [nodes[start + i * period :][:period] for i in range(count)]
        if count >= _FEWEST and all(is_pure(node) for layer in layers for node in layer):
            own = own_inputs(layers)
            if own is not None:
                runs.append(EqualLayers(layers, own))
    return runs


def own_inputs(layers: Sequence[Sequence[fx.Node]]) -> list[list[fx.Node]] | None:
    """The inputs that each layer alone reads; None where a layer after 1 does not read as it."""
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


def short_form(gm: fx.GraphModule, runs: Sequence[EqualLayers], last: int = 2) -> fx.GraphModule:
    """The graph without the layers between 2 and the last two, or so many as `last` says, each
    node marked by its number."""
    gone, second = set[fx.Node](), dict[fx.Node, fx.Node]()
    for run in runs:
        gone.update(*run.layers[SECOND + 1 : len(run.layers) - last])
        second |= zip(run.layers[-1 - last], run.layers[SECOND])
    graph, made, number = fx.Graph(), dict[fx.Node, fx.Node](), 0
    for node in gm.graph.nodes:
        if node not in gone:
            made[node] = graph.node_copy(node, lambda n: made[second.get(n, n)])
        if node in made and node.op not in ("placeholder", "output"):
            made[node].meta["custom"] = {**node.meta.get("custom", {}), COPY: number}
        number += node.op not in ("placeholder", "output")
    short = without_code(gm, graph)
    short.meta = dict(gm.meta)
    return short


def layouts_of(
    traced: fx.Graph,
    inputs: Sequence[fx.Node],
    outputs: int,
    gm: fx.GraphModule,
    runs: Sequence[EqualLayers],
) -> list[JointLayers]:
    """Where the layers of each run of `gm` lie in what was traced of its short form.

    inputs: those of the traced graph that are of the placeholders of `gm`. outputs: its results in
    front of gradients.
    """
    nodes = [n for n in gm.graph.nodes if n.op not in ("placeholder", "output")]
    given = dict(zip(gm.graph.find_nodes(op="placeholder"), inputs))
    marks = {node.name: node.meta.get("custom", {}).get(COPY) for node in traced.nodes}
    origin = {name: nodes[mark] for name, mark in marks.items() if mark is not None}
    order = {node.name: i for i, node in enumerate(traced.nodes)}
    return [JointLayers(traced, given, outputs, origin, order, run) for run in runs]


def unmark(graph: fx.Graph) -> None:
    """Take the marks of a short form off."""
    for node in graph.nodes:
        if COPY in node.meta.get("custom", {}):
            custom = {k: v for k, v in node.meta.pop("custom").items() if k != COPY}
            if custom:
                node.meta["custom"] = custom


def captured_by_layers(
    gm: fx.GraphModule,
    policies: Mapping[int, RegionPolicy],
    capture: Callable[[fx.GraphModule], fx.GraphModule],
) -> fx.GraphModule:
    """What `capture` makes of Dynamo's graph: of its short form, where that does.

    A layer's trace depends on what it reads and on who shares memory with that: where layers 1 and
    2 come out equal in both, those that follow do, also where they write.

    policies: of checkpointed regions, of which one may count how often it is asked.
    """

    def is_plain(node: fx.Node) -> bool:
        is_operator = node.op in ("call_function", "call_method")
        opaque = isinstance(node.target, HigherOrderOperator)
        return is_operator and not opaque and node.meta.get("ac_graph_id") not in policies

    runs = [] if _has_symbols(gm) else equal_layers(gm, is_plain)
    if runs:
        with contextlib.suppress(Unequal):
            return _grown(capture(short_form(gm, runs)), gm, runs)
    return capture(gm)


def _has_symbols(gm: fx.GraphModule) -> bool:
    return any(symbols(node.meta.get("example_value")) for node in gm.graph.nodes)


def _grown(
    short: fx.GraphModule, gm: fx.GraphModule, runs: Sequence[EqualLayers]
) -> fx.GraphModule:
    graph = short.graph
    inputs, results = graph.find_nodes(op="placeholder"), graph.output_node().args[0]
    layouts = layouts_of(graph, inputs, len(results), gm, runs)  # type: ignore[arg-type]
    growths = []
    with real_tensors():
        for layout in layouts:
            growths.append(Growth(layout, graph, cut=True))
            growths[-1].grow()
    unmark(graph)
    output: Any = graph.output_node()
    output.meta["val"] = fx.node.map_arg(output.args[0], lambda node: node.meta["val"])
    result = fx.GraphModule(short, _renamed(graph, growths))
    result.meta = dict(short.meta)
    return result


def _renamed(graph: fx.Graph, growths: Sequence[Growth]) -> fx.Graph:
    """The graph with the names of a whole capture, by which plan files call its nodes: each kind of
    operator is counted."""
    counts = [_counted(growth) for growth in growths]
    renamed, made = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.nodes:
        name = node.name
        if node.op not in ("placeholder", "output", "get_attr"):
            kind, number = _counted_name(re.sub(r"(_layer\d+)+$", "", name))
            for growth, count in zip(growths, counts):
                layout, place = growth.layout, growth.place.get(node, ELSEWHERE)
                if place.layer in layout.copied:
                    number += (place.layer - SECOND) * count[kind]
                elif layout.order[name] >= layout.above:
                    number += len(layout.copied) * count[kind]
            name = f"{kind}_{number}" if number else kind
        args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), made.__getitem__)
        target = node.target
        made[node] = renamed.create_node(node.op, target, args, kwargs, name, node.type)
        made[node].meta = node.meta
        if made[node].name != name:
            raise Unequal
    return renamed


def _counted(growth: Growth) -> Counter[str]:
    """How many operators of each kind a layer has."""
    found: Counter[str] = Counter()
    for node, place in growth.place.items():
        if place.layer == 1 and place.backward is False:
            (kind, one), (_, two) = map(_counted_name, (node.name, growth.next(node).name))
            if found.setdefault(kind, two - one) != two - one:
                raise Unequal
    return found


def _counted_name(name: str) -> tuple[str, int]:
    """`add_3` is the third after the first `add`."""
    found = re.fullmatch(r"(.*?)_(\d+)", name)
    return (found[1], int(found[2])) if found else (name, 0)
