"""A graph in three: its forward, its backward by inputs, its backward by weights.

    forward      parameters, inputs           ->  outputs, saved values
    by inputs    saved, output gradients      ->  gradients of inputs, what the third reads of it
    by weights   saved, output gradients, it  ->  nothing: adds to sums of parameters' gradients

The graphs are AOTAutograd's; its backward is cut between what the gradients of inputs need and the
rest, so nothing is computed twice. What only the third reads is kept until then.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from autoshard.compiling.gradient_sums import add_at_once, behind
from autoshard.compiling.inner import compile_local
from autoshard.errors import CaptureError, message
from autoshard.runtime.compat import forward_backward
from autoshard.runtime.graph_meta import DIFF


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
        """sums: the dtype in which gradients add up, of each placeholder that is a parameter with
        a gradient, by its position. inputs: how many placeholders, from the last on, are those.
        Raises CaptureError for outputs that share memory with something."""
        results = _results(gm)
        graphs = forward_backward(gm, fakes)
        outputs = _results(graphs.forward)
        given = graphs.forward.graph.find_nodes(op="placeholder")
        places = {node.name: i for i, node in enumerate(given)}
        saved = [n for n in outputs[len(results) :] if n is not None and n.name not in places]
        places.update({node.name: len(given) + i for i, node in enumerate(saved)})
        self.outputs = len(results)
        forward = _part(graphs.forward, [*outputs[: len(results)], *saved], ())
        self.forward_graph = _Compiled(forward, inner, given)
        self.graded = [i for i, n in enumerate(results) if n is not None and n.meta.get(DIFF)]
        backward = graphs.backward or fx.GraphModule({}, _without_gradients(len(given)))
        read = backward.graph.find_nodes(op="placeholder")
        self.saved = [places[node.name] for node in read if node.name in places]
        # A gradient arrives contiguous; the graphs read it in the layout of the output it is of.
        self.layouts = [node.meta["val"].stride() for node in read if node.name not in places]
        if len(read) != len(self.saved) + len(self.graded) or len(given) != len(fakes):
            raise CaptureError(
                message(
                    f"a stage keeps {len(self.saved)} values for its backward and sends "
                    f"{len(self.graded)} that have gradients, and its backward reads {len(read)}",
                    remedy="Use schedule='1f1b', which does not cut backwards.",
                )
            )
        gradients = _results(backward)
        of_inputs = gradients[len(gradients) - inputs :] if inputs else []
        own = [gradients[i] for i in sums]
        first = _ancestors(of_inputs)
        rest = _ancestors(own) - first
        needed = {each for node in rest for each in node.all_input_nodes} | set(own)
        crossing = [node for node in backward.graph.nodes if node in first and node in needed]
        self.by_inputs_graph = _Compiled(_part(backward, [*of_inputs, *crossing], ()), inner, read)
        # not `to`: AOTAutograd would take a sum for an alias
        totals_like = [torch.empty_like(fakes[i].detach(), dtype=d) for i, d in sums.items()]
        late = _adding(_part(backward, own, crossing), totals_like)
        totals = late.graph.find_nodes(op="placeholder")[-len(sums) :] if sums else []
        self.by_weights_graph = _Compiled(late, inner, [*read, *crossing, *totals])
        read_late = self.by_weights_graph.places
        self.late = read_late[: len(read_late) - len(sums)]
        self.inputs = inputs

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
        results = _results(graph)
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


def _results(gm: fx.GraphModule) -> list[fx.Node | None]:
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
    graph, results = gm.graph, _results(gm)
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
