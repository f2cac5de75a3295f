"""A graph in three: its forward, its backward by inputs, its backward by weights.

    forward      parameters, inputs           ->  outputs, saved values
    by inputs    saved, output gradients      ->  gradients of inputs, what the third reads of it
    by weights   saved, output gradients, it  ->  nothing: adds to sums of parameters' gradients

The graphs are AOTAutograd's; its backward is cut between what the gradients of inputs need and the
rest, so nothing is computed twice. What only the third reads is kept until then.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autoshard.compiling.gradient_sums import behind
from autoshard.errors import CaptureError, message
from autoshard.passes import after_cut
from autoshard.runtime.compat import ForwardBackward, forward_backward
from autoshard.runtime.graph_meta import DIFF


@dataclass(frozen=True, kw_only=True)
class BackwardCut:
    """The three graphs; a value has the same name in all of them.

    results: how many outputs of `forward` are the graph's own, before the saved ones. graded: those
    of them that have a gradient. inputs: how many outputs of `by_inputs` are gradients, before what
    `by_weights` reads. given, read, crossing, totals: the placeholders of the forward and of the
    uncut backward, the values that cross its cut, and the sums, the last placeholders of
    `by_weights`.
    """

    forward: fx.GraphModule
    by_inputs: fx.GraphModule
    by_weights: fx.GraphModule
    results: int
    graded: Sequence[int]
    inputs: int
    given: Sequence[fx.Node]
    read: Sequence[fx.Node]
    crossing: Sequence[fx.Node]
    totals: Sequence[fx.Node]


def cut_backward(
    gm: fx.GraphModule,
    fakes: list[Any],
    sums: Mapping[int, torch.dtype],
    inputs: int,
    graphs: ForwardBackward | None = None,
) -> BackwardCut:
    """The three graphs of a graph.

    sums: the dtype in which gradients add up, of each placeholder that is a parameter with a
    gradient, by its position. inputs: how many placeholders, from the last on, are those.
    graphs: those that AOTAutograd made of it, where they are known.
    Raises CaptureError for outputs that share memory with something.
    """
    results = results_of(gm)
    graphs = graphs or forward_backward(gm, fakes, after_cut)
    outputs = results_of(graphs.forward)
    given = graphs.forward.graph.find_nodes(op="placeholder")
    graded = [i for i, n in enumerate(results) if n is not None and n.meta.get(DIFF)]
    backward = graphs.backward or fx.GraphModule({}, _without_gradients(len(given)))
    read = backward.graph.find_nodes(op="placeholder")
    for node, arrived in zip(outputs[len(results) :], read):
        if node is not None and node.name != arrived.name:
            node.name = arrived.name  # the state of a generator, where an operator runs again
    names = {node.name for node in given}
    saved = [n for n in outputs[len(results) :] if n is not None and n.name not in names]
    names |= {node.name for node in saved}
    kept = sum(node.name in names for node in read)
    if len(read) != kept + len(graded) or len(given) != len(fakes):
        raise CaptureError(
            message(
                f"a stage keeps {kept} values for its backward and sends {len(graded)} that have "
                f"gradients, and its backward reads {len(read)}",
                remedy="Use options={'pipeline': {'schedule': '1f1b'}}, which cuts no backward.",
            )
        )
    gradients = results_of(backward)
    of_inputs = gradients[len(gradients) - inputs :] if inputs else []
    own = [gradients[i] for i in sums]
    first = _ancestors(of_inputs)
    rest = _ancestors(own) - first
    needed = {each for node in rest for each in node.all_input_nodes} | set(own)
    crossing = [node for node in backward.graph.nodes if node in first and node in needed]
    # not `to`: AOTAutograd would take a sum for an alias
    likes = [torch.empty_like(fakes[i].detach(), dtype=d) for i, d in sums.items()]
    by_weights = _adding(_part(backward, own, crossing), likes)
    return BackwardCut(
        forward=_part(graphs.forward, [*outputs[: len(results)], *saved], ()),
        by_inputs=_part(backward, [*of_inputs, *crossing], ()),
        by_weights=by_weights,
        results=len(results),
        graded=graded,
        inputs=inputs,
        given=given,
        read=read,
        crossing=crossing,
        totals=by_weights.graph.find_nodes(op="placeholder")[-len(sums) :] if sums else [],
    )


def results_of(gm: fx.GraphModule) -> list[fx.Node | None]:
    """What a graph returns."""
    found: Any = gm.graph.output_node().args[0]
    return list(found)


def _ancestors(nodes: Sequence[fx.Node | None]) -> set[fx.Node]:
    """Operators that values are computed by, their own included."""
    found: set[fx.Node] = set()
    stack = [node for node in nodes if node is not None and node.op != "placeholder"]
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack += [each for each in node.all_input_nodes if each.op != "placeholder"]
    items = [user for node in found for user in node.users if user.target is operator.getitem]
    return found.union(items)  # what is made together is there together


def _part(
    gm: fx.GraphModule, wanted: Sequence[fx.Node | None], given: Sequence[fx.Node]
) -> fx.GraphModule:
    """The graph that computes some values of a graph from its placeholders and `given` ones."""
    stop, needed = set(given), set[fx.Node]()
    stack = [node for node in wanted if node is not None]
    while stack:
        node = stack.pop()
        if node not in needed:
            needed.add(node)
            stack += [] if node in stop else node.all_input_nodes
    graph, made = fx.Graph(), dict[fx.Node, fx.Node]()
    inputs = [n for n in gm.graph.nodes if n in needed and (n.op == "placeholder" or n in stop)]
    for node in inputs:
        made[node] = graph.placeholder(node.name)
        made[node].meta = dict(node.meta)
    for node in gm.graph.nodes:
        if node in needed and node not in made:
            made[node] = graph.node_copy(node, made.__getitem__)
    graph.output(tuple(None if node is None else made[node] for node in wanted))
    return fx.GraphModule(gm, graph)


def _adding(gm: fx.GraphModule, likes: Sequence[torch.Tensor]) -> fx.GraphModule:
    """The graph that adds its results to as many sums, its last placeholders, and returns none.

    likes: fakes of the sums. In place, right after what is added is made; nothing to a sum whose
    parameter an operator reads without a gradient (a loss, the weights of its classes).
    """
    graph, results = gm.graph, results_of(gm)
    given = graph.find_nodes(op="placeholder")
    sums = []
    with graph.inserting_before(next(n for n in graph.nodes if n not in set(given))):
        for i, like in enumerate(likes):
            sums.append(graph.placeholder(f"gradient_sum_{i}"))
            sums[-1].meta["val"] = like
    for total, node in zip(sums, results):
        if node is None:
            continue
        with graph.inserting_after(behind(node)):
            add = graph.call_function(torch.ops.aten.add_.Tensor, (total, node))
            add.meta["val"] = total.meta["val"]
    graph.output_node().args = ((),)
    gm.recompile()
    return gm


def _without_gradients(parameters: int) -> fx.Graph:
    graph = fx.Graph()
    graph.output((None,) * parameters)
    return graph
