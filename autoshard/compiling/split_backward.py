"""A stage whose backward is compiled in two parts (`backward_cut.py`): that by weights may wait."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from autoshard.compiling.backward_cut import cut_backward, results_of
from autoshard.compiling.gradient_sums import add_at_once
from autoshard.compiling.inner import compile_local


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
