"""Equal stretches of a graph, which a compiler is given once: the layers of a model.

    %1 = mm(%x, %w.0)                 region A(x, w):  %0 = mm(x, w)
    %2 = relu(%1)                                      %1 = relu(%0)
    %3 = mm(%2, %w.1)                                  return (%1)
    %4 = relu(%3)            ->
    %5 = mm(%4, %w.2)                 %2 = A(%x, %w.0)
    %6 = relu(%5)                     %4 = A(%2, %w.1)
                                      %6 = A(%4, %w.2)

What each layer has of its own is an input: weights, their gathers, seeds and numbers of its draws.
Two stretches (`stretches.py`) are one region where operators, arguments, shapes, strides, dtypes
and what leaves them are equal; others are compiled alone.

Not done: graphs with sizes that come of data; integers that count layers, by which these are
unequal.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autoshard.capture import described, label, symbols
from autoshard.compiling.stretches import PartsInOrder
from autoshard.passes import ALL_REDUCE, COLLECTIVES, aten, module_path, waits_of
from autoshard.planning import is_view, packet

WORTH = 0.7
"""The share of a graph's operators in different regions above which the graph stays whole."""

_OF_STRIDES = {aten.as_strided, aten.convolution, aten.convolution_backward}

_NUMBERED = re.compile(r".*?\.\d+(?=\.|$)")


@dataclass(frozen=True)
class GraphPart:
    """A piece of a graph, of which all with equal `key` are one region.

    nodes: its operators. constants: what it computes anew, such as a tensor of zeros. inputs: what
    it reads. outputs: what is read elsewhere. exact: those whose strides must be as they are in the
    graph. laid_out: of all parts, the results written contiguous that the graph has otherwise.
    until: the part up to which a value must live that a collective under way still reads.
    in_storage: whether an operator counts from the start of an input's storage.
    """

    nodes: tuple[fx.Node, ...]
    constants: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    exact: tuple[bool, ...]
    laid_out: Mapping[fx.Node, torch.Tensor]
    key: Hashable
    until: Mapping[fx.Node, int]
    in_storage: bool


def parts_of(
    gm: fx.GraphModule, marks: Mapping[fx.Node, Hashable] | None = None
) -> list[GraphPart] | None:
    """The graph in parts, in the order in which they run; None where it is better left whole.

    marks: what a compiler must know of an input besides its metadata.
    """
    layout = PartsInOrder(gm.graph)
    slots = layout.slots()
    if slots is None:
        return None
    parts = _GraphParts(gm.graph, slots, layout.constants, marks or {}).parts()
    if parts is None:
        return None
    sizes = {part.key: len(part.nodes) for part in parts}
    return parts if sum(sizes.values()) <= WORTH * len(layout.nodes) else None


def layer_of(part: GraphPart) -> str:
    """The numbered module that most operators of a part are of, such as `model.layers.3`."""
    names = [match[0] for n in part.nodes if (match := _NUMBERED.match(module_path(n)))]
    return Counter(names).most_common(1)[0][0] if names else ""


class _GraphParts:
    """The parts of a graph whose operators were given their places."""

    def __init__(
        self,
        graph: fx.Graph,
        slots: Sequence[Sequence[fx.Node]],
        constants: Collection[fx.Node],
        marks: Mapping[fx.Node, Hashable],
    ) -> None:
        self.slots, self.constants, self.marks = slots, constants, marks
        self.home = {node: i for i, nodes in enumerate(slots) for node in nodes}
        self.held: dict[fx.Node, int] = {}
        for node in self.home:
            # what an all-reduce sums is its result's own
            if node.target in COLLECTIVES and node.target is not ALL_REDUCE:
                last = max((self.home[each] for each in waits_of(node)), default=len(slots) - 1)
                for source in node.all_input_nodes:
                    if last > self.home[node]:
                        self.held[source] = max(last, self.held.get(source, 0))
        self.symbols = {
            str(node.meta["val"]): node
            for node in graph.find_nodes(op="placeholder")
            if isinstance(node.meta.get("val"), torch.SymInt)
        }
        output = graph.output_node()
        results: Any = output.args[0]
        visible = output.meta.get("user_visible_output_idxs", ())
        self.visible = {results[i] for i in visible if isinstance(results[i], fx.Node)}
        self.laid_out = {
            node: torch.empty_like(node.meta["val"], memory_format=torch.contiguous_format)
            for node in self.home
            if self._is_pinned_in_vain(node)
        }

    def parts(self) -> list[GraphPart] | None:
        """None where a size is in no input."""
        found = [self._part(i, nodes) for i, nodes in enumerate(self.slots)]
        return None if None in found else found  # type: ignore[return-value]

    def _is_pinned_in_vain(self, node: fx.Node) -> bool:
        """Whether other parts would get a value in an order of dims that nobody asks for, and that
        Inductor would not keep inside of a graph. A vision transformer's sum through all layers
        inherits that of the convolution before them, and each normalization reads across it."""
        val = node.meta.get("val")
        return (
            isinstance(val, torch.Tensor)
            and not val.is_contiguous()
            and torch.ops.aten.is_non_overlapping_and_dense(val)
            and node not in self.visible
            and not is_view(node)
            and any(self.home.get(user, self.home[node]) != self.home[node] for user in node.users)
            and all(_takes_any_strides(each) for each in [node, *node.users] if each.op != "output")
        )

    def _part(self, number: int, nodes: Sequence[fx.Node]) -> GraphPart | None:
        constants = self._constants_of(nodes)
        all_nodes = [*constants, *nodes]
        own = {node: i for i, node in enumerate(all_nodes)}
        read = dict.fromkeys(n for node in all_nodes for n in node.all_input_nodes if n not in own)
        names = {name for n in [*read, *all_nodes] for name in symbols(n.meta.get("val"))}
        if names - self.symbols.keys():
            return None
        sizes = [node for name, node in self.symbols.items() if name in names and node not in read]
        inputs = [*sizes, *read]
        outside = {node: -1 - i for i, node in enumerate(inputs)}
        outputs, exact = [], []
        for node in nodes:
            elsewhere = [u for u in node.users if u not in own]
            if elsewhere or node in self.held:
                outputs.append(node)
                exact.append(node in self.visible or any(u.op != "output" for u in elsewhere))
        # such an operator counts from the start of the storage, not of the tensor
        in_storage = any(node.target is aten.as_strided.default for node in nodes)
        key = (
            tuple(label(node, lambda n: own.get(n, outside.get(n))) for node in all_nodes),
            tuple(self._described_input(n, in_storage) for n in inputs),
            tuple((own[n], each, n in self.laid_out) for n, each in zip(outputs, exact)),
        )
        return GraphPart(
            nodes=tuple(nodes),
            constants=tuple(constants),
            inputs=tuple(inputs),
            outputs=tuple(outputs),
            exact=tuple(exact),
            laid_out=self.laid_out,
            key=key,
            until={n: self.held[n] for n in [*inputs, *outputs] if self.held.get(n, 0) > number},
            in_storage=in_storage,
        )

    def _described_input(self, node: fx.Node, in_storage: bool) -> Hashable:
        val = self.laid_out.get(node, node.meta.get("val"))
        return (described(val, in_storage), _is_aligned(val), self.marks.get(node))

    def _constants_of(self, nodes: Sequence[fx.Node]) -> list[fx.Node]:
        found: dict[fx.Node, None] = {}

        def add(node: fx.Node) -> None:
            for source in node.all_input_nodes:
                if source in self.constants and source not in found:
                    add(source)
                    found[source] = None

        for node in nodes:
            add(node)
        return list(found)


def _takes_any_strides(node: fx.Node) -> bool:
    plain = getattr(node.target, "namespace", None) == "aten"
    return plain and packet(node) not in _OF_STRIDES


def _is_aligned(val: Any) -> bool:
    """Whether a GPU reads a value's first 16 bytes at once, as far as its storage offset says."""
    if not isinstance(val, torch.Tensor) or val.device.type == "cpu":
        return True
    start = val.storage_offset()
    return isinstance(start, int) and start * val.element_size() % 16 == 0
