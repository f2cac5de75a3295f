"""A graph in three: its forward, its backward by inputs, its backward by weights.

    forward      parameters, inputs           ->  outputs, saved values
    by inputs    saved, output gradients      ->  gradients of inputs, what the third reads of it
    by weights   saved, output gradients, it  ->  nothing: adds to sums of parameters' gradients

The graphs are AOTAutograd's; its backward is cut between what the gradients of inputs need and the
rest, so nothing is computed twice. What only the third reads is kept until then.

A stage whose backward is compiled in two parts (`backward_cut.py`): that by weights may wait.

Sums of gradients that are written where the gradients are made.

    before                         after
    %0 = mm(%a, %b)                %0 = mm(%a, %b)
    %1 = mm(%c, %d)                %1 = add_(%sum, %0)
    %2 = add(%sum, %0)             %2 = mm(%c, %d)
    %3 = copy_(%sum, %2)

AOTAutograd makes a graph without side effects, and writes to its inputs at the end: until then each
gradient is there, and its sum once more.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autoshard.compiling.inner import compile_local
from autoshard.errors import CaptureError
from autoshard.passes import after_cut
from autoshard.planning import is_view, reached
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
            f"a stage keeps {kept} values for its backward and sends {len(graded)} that have "
            f"gradients, and its backward reads {len(read)}",
            remedy="Use options={'pipeline': {'schedule': '1f1b'}}, which cuts no backward.",
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
    found: Any = gm.graph.output_node().args[0]
    return list(found)


def _ancestors(nodes: Sequence[fx.Node | None]) -> set[fx.Node]:
    """Operators that values are computed by, their own included."""
    found = reached((node for node in nodes if node is not None), lambda node: node.all_input_nodes)
    own = {node for node in found if node.op != "placeholder"}
    items = [user for node in own for user in node.users if user.target is operator.getitem]
    return own.union(items)  # what is made together is there together


def _part(
    gm: fx.GraphModule, wanted: Sequence[fx.Node | None], given: Sequence[fx.Node]
) -> fx.GraphModule:
    """The graph that computes some values of a graph from its placeholders and `given` ones."""
    stop, starts = set(given), [node for node in wanted if node is not None]
    needed = reached(starts, lambda node: [] if node in stop else node.all_input_nodes)
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


class SplitBackward:
    """The three graphs, compiled: the `TwoBackwards` of a stage."""

    def __init__(
        self,
        gm: fx.GraphModule,
        fakes: list[Any],
        sums: Mapping[int, torch.dtype],
        inputs: int,
        inner: str,
    ) -> None:
        """As for `cut_backward`."""
        cut = cut_backward(gm, fakes, sums, inputs)
        self.outputs, self.graded, self.inputs = cut.results, cut.graded, inputs
        names = [node.name for node in cut.given]
        names += [node.name for node in results_of(cut.forward)[cut.results :] if node is not None]
        places = {name: i for i, name in enumerate(names)}
        self.saved = [places[node.name] for node in cut.read if node.name in places]
        # A gradient arrives contiguous; the graphs read it in the layout of the output it is of.
        arriving = [node for node in cut.read if node.name not in places]
        self.layouts = [node.meta["val"].stride() for node in arriving]
        self.forward_graph = _Compiled(cut.forward, inner, cut.given)
        self.by_inputs_graph = _Compiled(cut.by_inputs, inner, cut.read)
        late = [*cut.read, *cut.crossing, *cut.totals]
        self.by_weights_graph = _Compiled(cut.by_weights, inner, late)
        read_late = self.by_weights_graph.places
        self.late = read_late[: len(read_late) - len(sums)]

    def forward(self, arguments: Sequence[torch.Tensor]) -> tuple[Sequence[torch.Tensor], Any]:
        """The outputs, and what is kept for the backward."""
        with torch.no_grad():
            found = self.forward_graph(arguments)
        there = [*arguments, *found[self.outputs :]]
        return found[: self.outputs], [there[i] for i in self.saved]  # type: ignore[return-value]

    def by_inputs(
        self, kept: Any, gradients: Mapping[int, torch.Tensor]
    ) -> tuple[list[torch.Tensor | None], Any]:
        """The gradients of the inputs, and what is kept for those of the parameters.

        gradients: of outputs, by their position.
        """
        arrived = [_laid_out(gradients[i], of) for i, of in zip(self.graded, self.layouts)]
        values = [*kept, *arrived]
        arrived.clear()
        count = len(values)
        late = {i: values[i] for i in self.late if i < count}
        reads = self.by_inputs_graph.reads(values)
        kept.clear()  # freed one by one, as they were read
        values.clear()
        with torch.no_grad():
            found = self.by_inputs_graph.of_read(reads)
        made = found[self.inputs :]
        return found[: self.inputs], [late[i] if i in late else made[i - count] for i in self.late]

    def by_weights(self, kept: Any, sums: Sequence[torch.Tensor]) -> None:
        """Add the gradients of the parameters to `sums`."""
        with torch.no_grad():
            values = [*kept, *sums]
            kept.clear()
            self.by_weights_graph.of_read(values)


class _Compiled:
    """A graph compiled, of those of some values that it reads; its outputs may be None."""

    def __init__(self, graph: fx.GraphModule, inner: str, given: Sequence[fx.Node]) -> None:
        names = {node.name: i for i, node in enumerate(given)}
        placeholders = graph.graph.find_nodes(op="placeholder")
        self.places = [names[node.name] for node in placeholders]
        results = results_of(graph)
        distinct = list(dict.fromkeys(node for node in results if node is not None))
        number = {node: i for i, node in enumerate(distinct)}
        self.numbers = [None if node is None else number[node] for node in results]
        graph.graph.output_node().args = (tuple(distinct),)
        graph.recompile()
        fakes = [node.meta["val"].detach() for node in placeholders]
        self.run: Callable[[list[Any]], Any] = lambda values: graph(*values)
        if any(node.op == "call_function" for node in graph.graph.nodes):
            with torch.no_grad():
                self.run = compile_local(graph, fakes, inner, add_at_once, takes_list=True)

    def reads(self, values: Sequence[Any]) -> list[Any]:
        """Of all the values, those that it reads."""
        return [values[i] for i in self.places]

    def of_read(self, values: list[Any]) -> list[Any]:
        """The outputs, of those values. Clears the list: they are freed after their last use."""
        found = self.run(values)
        return [None if i is None else found[i] for i in self.numbers]

    def __call__(self, values: Sequence[Any]) -> list[Any]:
        """The outputs, of all the values."""
        return self.of_read(self.reads(values))


def _laid_out(x: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    return x if x.stride() == strides else x.new_empty_strided(x.shape, strides).copy_(x)


aten = torch.ops.aten


def add_at_once(gm: fx.GraphModule, backward: bool = True) -> None:
    """Add to sums among the graph's inputs right after what is added is made, in place.

    Only sums that nothing else reads; for both of AOTAutograd's graphs, and those without autograd.
    """
    graph = gm.graph
    for write in graph.find_nodes(op="call_function", target=aten.copy_.default):
        total, source = write.args[:2]
        add: Any = source.args[0] if source.target is aten._to_copy.default else source
        if total.op != "placeholder" or add.target is not aten.add.Tensor or write.users:
            continue
        gradient, between = add.args[1], [add, *([source] if source is not add else [])]
        alone = set(total.users) == {add, write} and all(len(n.users) == 1 for n in between)
        if add.args[0] is not total or add.kwargs or not alone:
            continue
        with graph.inserting_after(behind(gradient)):
            at_once = graph.call_function(aten.add_.Tensor, (total, gradient))
        at_once.meta = {**add.meta, "val": total.meta["val"]}
        for node in (write, *reversed(between)):
            graph.erase_node(node)
    gm.recompile()


def behind(gradient: fx.Node) -> fx.Node:
    """The node after which a gradient is read first. It is moved, where it is a view, to what it is
    a view of."""
    views = [gradient]
    while is_view(views[-1]) and len(views[-1].all_input_nodes) == 1:
        views.append(views[-1].all_input_nodes[0])
    last = views.pop()
    if last.op == "placeholder":
        last = last.graph.find_nodes(op="placeholder")[-1]
    for view in reversed(views):
        last.append(view)
        last = view
    return last
