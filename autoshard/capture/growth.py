"""A graph that was traced with five of its equal layers gets the others again.

    joint graph, traced              forward, grown           backward, grown
    forward 0 1 2 5 6                0 1 2 3 4 5 6            6 5 4 3 2 1 0
    backward 6 5 2 1 0

What comes of a layer depends on the metadata of what it reads, and backward of the gradients that
it gets. Layer 1 reads what layer 0 made, layer 2 what layer 1 made: where both come out equal, so
does each that follows; and backward likewise. Copies are those of layer 2, with weights, module
names and choices of recomputation of their own layers, and memory of their own.

What grows is a capture, a joint graph, or the two that a partitioner made of the short one, where
it treats layers 1 and 2 alike.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from autoshard.capture.tandem import described, tensors_of, writes
from autoshard.planning import reached
from autoshard.runtime.compat import Unequal, fake_in, is_backward, storage_key
from autoshard.runtime.graph_meta import DIFF

SECOND = 2
"""The layer that is copied."""

_STACKS = {"nn_module_stack", "source_fn_stack", "fwd_nn_module_stack", "fwd_source_fn_stack"}
_CHOSEN = ("recompute", "ac_graph_id")  # which operators of some layers alone may have
_OF_ORIGIN = {"stack_trace", "torch_fn", *_CHOSEN} | _STACKS  # see `_copy`


class LayerPlace(NamedTuple):
    """Of a node of the joint graph: its layer, whether forward, backward or (None) an input that
    the layer alone reads, and which one among those."""

    layer: int
    backward: bool | None
    offset: int


ELSEWHERE = LayerPlace(-1, None, 0)


class EqualLayers(NamedTuple):
    """Equal layers, one after another. own: inputs that each alone reads, from layer 1 on."""

    layers: Sequence[Sequence[fx.Node]]
    own: Sequence[Sequence[fx.Node]]


class JointLayers:
    """Where the layers of one run lie in a joint graph. By name, as a node has one name there and
    in the graphs that are cut of it; copies are named by their layers.

    inputs: of the traced graph, in the joint one. origin, order: of a node, the operator of the
    whole graph that it is of, and its position.
    """

    def __init__(
        self,
        joint: fx.Graph,
        inputs: Mapping[fx.Node, fx.Node],
        outputs: int,
        origin: dict[str, fx.Node],
        order: dict[str, int],
        run: EqualLayers,
    ) -> None:
        self.inputs, self.outputs, self.run = inputs, outputs, run
        self.origin, self.order = origin, order
        self.end = len(run.layers) - 2  # the first layer behind those that are left out
        self.copied = range(SECOND + 1, self.end)
        self.after = {0: 1, 1: SECOND, SECOND: self.end, self.end: self.end + 1}
        self.home = {n: (k, i) for k, layer in enumerate(run.layers) for i, n in enumerate(layer)}
        self.place: dict[str, LayerPlace] = {}
        for k, own in enumerate(run.own):
            for i, each in enumerate(own):
                self.place[inputs[each].name] = LayerPlace(k, None, i)
        nodes = [n for n in joint.nodes if n.op not in ("placeholder", "output")]
        above, below = self._lay_out(nodes)
        positions = [order[node.name] for node in nodes]
        self.above, self.below = (
            positions[i] if i < len(nodes) else positions[-1] + 1 for i in (above, below)
        )
        counted = [node.meta.get("seq_nr", 0) for node in nodes if not is_backward(node)]
        begins = [self.place.get(n.name) for n in nodes].index(LayerPlace(SECOND, False, 0))
        self.last, self.period = counted[-1], max(counted[:above]) - max(counted[:begins])

    def _lay_out(self, nodes: Sequence[fx.Node]) -> tuple[int, int]:
        """Give nodes their places, by the first one of each layer, forward and backward. The
        positions in front of which layers are missing."""
        first: dict[tuple[bool, int], int] = {}
        for i, node in enumerate(nodes):
            first.setdefault((is_backward(node), self._layer_of(node)), i)
        end = len(nodes)
        one, two, above = (first.get((False, k), end) for k in (1, SECOND, self.end))
        below, under = (first.get((True, k), end) for k in (SECOND, 1))
        if not one < two < above < end or two - one != above - two:
            raise Unequal
        self._place(nodes, False, (0, 1, SECOND, self.end), one, two - one)
        if below < under < end:
            self._place(nodes, True, (self.end, SECOND, 1, 0), below, under - below)
        elif below != under:
            raise Unequal
        return above, below

    def _layer_of(self, node: fx.Node) -> int:
        """The layer whose operator a node is of; -1: none."""
        return self.home.get(self.origin.get(node.name), (-1, 0))[0]  # type: ignore[arg-type]

    def _place(
        self, nodes: Sequence[fx.Node], back: bool, layers: Sequence[int], second: int, period: int
    ) -> None:
        """The places of four layers, of which the second begins there. Of the first and the last of
        them, which may differ, only what may be theirs."""
        begins = dict(zip(layers, range(second - period, second + 3 * period, period)))
        for layer in (1, SECOND, 0, self.end):
            start, sure = begins[layer], layer in (1, SECOND)
            span = nodes[max(start, 0) : start + period]
            if sure and (len(span) < period or any(node.name in self.place for node in span)):
                raise Unequal
            for i, node in enumerate(span, max(-start, 0)):
                known = node.name in self.origin
                may = node.name not in self.place and (not known or self._layer_of(node) == layer)
                if sure or may:
                    self.place[node.name] = LayerPlace(layer, back, i)

    def shifted(self, home: int, layer: int) -> int:
        """The layer that is to one as a traced one is to layer 2."""
        return layer + (home - SECOND if home <= SECOND else home - self.end + 1)


class Growth:
    """A graph that gets the layers of one run that are left out: a joint one, or, as `cut`, one
    without gradients (a capture, a forward), or, with the growth of that, the backward."""

    def __init__(
        self, layout: JointLayers, graph: fx.Graph, cut: bool = False, forward: Growth | None = None
    ) -> None:
        self.layout, self.graph, self.cut, self.forward = layout, graph, cut, forward
        self.place = {n: layout.place[n.name] for n in graph.nodes if n.name in layout.place}
        self.at = {place: node for node, place in self.place.items()}
        beside = {0: 1, layout.end: SECOND}
        for node, place in [*self.place.items()]:
            other = place._replace(layer=beside.get(place.layer, place.layer))
            if place.backward is not None and other not in self.at:
                del self.place[node], self.at[place]  # equal in all layers: computed once now
        first: dict[int, tuple[fx.Node, int]] = {}
        self.owners: dict[fx.Node, list[tuple[fx.Node, int]]] = {}  # the first in a tensor's memory
        for node in graph.nodes:
            keys = enumerate(map(storage_key, tensors_of(node)))
            self.owners[node] = [first.setdefault(key, (node, i)) for i, key in keys]

    def grow(self) -> None:
        """Compare, copy, and have the others read the copies; or `Unequal`."""
        layout, graph = self.layout, self.graph
        one, two = ([n for n, p in self.place.items() if p.layer == k] for k in (1, SECOND))
        if {self.next(node) for node in one} != {*two}:
            raise Unequal
        for node in one:
            if self.place[node].backward is not None:
                self._compare(node, self.next(node))
        operators = [n for n in graph.nodes if n.op not in ("placeholder", "output")]
        if not layout.order.keys() >= {node.name for node in operators}:
            raise Unequal  # the partitioner has others: of random numbers that are drawn again
        reads, gradients = self._reads(operators), self._gradients()
        last: Any = None
        for node, layer in self._in_order(graph.find_nodes(op="placeholder")):
            place = self.place.get(node, ELSEWHERE)
            if place.layer != SECOND or place._replace(layer=layer) in self.at:
                last = node if layer == SECOND else last
            else:
                with graph.inserting_after(last):
                    last = self._copy(node, layer)
        ahead, back = (
            [n for n in two if n.op != "placeholder" and bool(self.place[n].backward) is late]
            for late in (False, True)
        )
        ends = None if self.forward is not None or not ahead else ahead[-1].next
        with graph.inserting_before(ends or graph.output_node()):
            again = [self._copy(node, layer) for layer in layout.copied for node in ahead]
        with graph.inserting_before(back[0] if back else None):
            for layer in reversed(layout.copied):
                for node in back:
                    self._copy(node, layer)
        for reader, read, layer in reads:
            instead = self._of(read, layer)
            reader.replace_input_with(read, instead)
            self._set_values(reader, reader, {read: instead}.get)
        for node in operators:
            behind = layout.above <= layout.order[node.name] < layout.below
            self._renumber(node.meta, layout.end - 1 if behind else SECOND)
        self._set_results(gradients)
        for place in [place for place in self.at if place.layer in layout.copied]:
            of = self.at.get(place._replace(layer=SECOND))
            if of is not None and of.users and not self.at[place].users:
                raise Unequal  # nobody reads what layer 2's is read of
        if self.forward is not None:
            _compute_late(graph, {*again})

    def _in_order(self, nodes: Iterable[Any]) -> Iterator[tuple[Any, int]]:
        """Nodes with layer 2, and between them those of it with each layer that is added, in the
        order of the whole graph."""

        def kind(node: Any) -> tuple[LayerPlace, Any]:
            place = self.place.get(node, ELSEWHERE)
            place = place._replace(offset=0) if place.layer == SECOND else ELSEWHERE
            return place, node.meta.get("saved_tensor_with_no_vc_check")  # AOTAutograd's last

        for (place, _), block in itertools.groupby(nodes, kind):
            layers = [SECOND, *self.layout.copied][:: -1 if place.backward else 1]
            members = [*block]
            for layer in layers if place.layer == SECOND else [SECOND]:
                yield from ((node, layer) for node in members)

    def _compare(self, one: fx.Node, other: fx.Node) -> None:
        """Raise `Unequal` unless a node does in layer 2 what one does in layer 1."""
        layout = self.layout
        args = fx.node.map_arg((one.args, dict(one.kwargs)), self.next)
        a, b = (layout.origin.get(node.name) for node in (one, other))
        layer, i = layout.home.get(a, (-1, -1))  # type: ignore[arg-type]
        is_input = one.op == other.op == "placeholder"
        alike = (
            (is_input or (one.op == other.op == "call_function" and one.target == other.target))
            and args == (other.args, dict(other.kwargs))
            and described(one.meta.get("val"), True) == described(other.meta.get("val"), True)
            and one.meta.keys() == other.meta.keys()
            and one.meta.get(DIFF) == other.meta.get(DIFF)
            and is_backward(one) == is_backward(other)
            and (a is b or (layout.after.get(layer, -1), i) == layout.home.get(b))  # type: ignore[arg-type]
        )
        if not alike or writes(one.target):
            raise Unequal
        for j, ((owner, i), theirs) in enumerate(zip(self.owners[one], self.owners[other])):
            shared = owner is one and i != j  # results in one memory, which is their own
            if shared or (self.next(owner), i) != theirs:
                raise Unequal

    def next(self, node: Any) -> Any:
        """What is to the layer after it what a node is to its own."""
        if node not in self.place:
            return node
        place = self.place[node]
        return self.at.get(place._replace(layer=self.layout.after.get(place.layer, -1)))

    def _reads(self, operators: Iterable[fx.Node]) -> list[tuple[fx.Node, fx.Node, int]]:
        """A node, what it reads or is a view of, and the layer to which it reads as to layer 2."""
        layout, found = self.layout, []
        for node in operators:
            if layout.order[node.name] < layout.above:
                continue
            behind = layout.order[node.name] < layout.below  # of the last layers, or of no layer
            mine = self.place.get(node, ELSEWHERE).layer
            memory = [owner for owner, _ in self.owners[node]]
            for read in dict.fromkeys((*node.all_input_nodes, *memory)):
                layer = self.place.get(read, ELSEWHERE).layer
                if (behind and layer == 1) or (not behind and mine not in (1, 2) and layer == 2):
                    raise Unequal
                if behind and layer == SECOND:
                    found.append((node, read, layout.end - 1))
                elif not behind and mine == SECOND and layer == layout.end:
                    found.append((node, read, SECOND))
        return found

    def _gradients(self) -> dict[int, tuple[Any, int]]:
        """Results that change: the gradients of each layer's own inputs are to it what those of
        layer 2's are to layer 2."""
        layout = self.layout
        results: Any = self.graph.output_node().args[0]
        before = len(results) - len(layout.inputs)  # gradients of constants are there, too
        found: dict[int, tuple[Any, int]] = {}
        if self.forward is not None or not self.cut:
            names = [node.name for node in layout.inputs.values()]
            slot = {layout.place.get(name): before + i for i, name in enumerate(names)}
            for i in range(len(layout.run.own[SECOND])):
                one, two, end = (slot[LayerPlace(k, None, i)] for k in (1, SECOND, layout.end))
                node = results[two]
                if self.next(results[one]) is not node:
                    raise Unequal
                for layer in (SECOND, *layout.copied):
                    found[slot[LayerPlace(layer, None, i)]] = (node, layer)
                if self.place.get(results[end], ELSEWHERE).layer == SECOND:
                    found[end] = (results[end], layout.end - 1)
        only_forward = self.cut and self.forward is None
        for i, node in enumerate(results[: layout.outputs] if only_forward else results):
            layer = self.place.get(node, ELSEWHERE).layer
            inner = layer == 1 and (only_forward or i < before)
            if i not in found and (layer == SECOND or inner):
                raise Unequal
        return found

    def _set_results(self, gradients: Mapping[int, tuple[Any, int]]) -> None:
        """The gradients of all layers, or what a forward keeps of all of them for backward."""
        output: Any = self.graph.output_node()
        results = output.args[0]
        whole = [*results]
        for i, (node, layer) in gradients.items():
            whole[i] = self._of(node, layer)
        if self.cut and self.forward is None:
            before, told = self.layout.outputs, output.meta.get("desc")
            kept = [*self._in_order(results[before:])]
            whole[before:] = [n if layer == SECOND else self._of(n, layer) for n, layer in kept]
            if told is not None:
                of = dict(zip(results[before:], told[before:]))
                output.meta["desc"] = [*told[:before], *(of[node] for node, _ in kept)]
        output.args = (tuple(whole) if self.cut else whole,)

    def _of(self, node: Any, layer: int) -> Any:
        """What is to a layer what a node is to layer 2."""
        if node not in self.place:
            return node
        place = self.place[node]
        found = self.at.get(place._replace(layer=self.layout.shifted(place.layer, layer)))
        if found is None:
            raise Unequal
        return found

    def _copy(self, node: fx.Node, layer: int) -> fx.Node:
        layout, place = self.layout, self.place[node]._replace(layer=layer)
        twin = None if self.forward is None else self.forward.at.get(place)
        name = f"{node.name}_layer{layer}" if twin is None else twin.name
        given = (node.args, node.kwargs)
        target = name if node.op == "placeholder" else node.target
        made = self.graph.create_node(node.op, target, name=name)  # searches what args it is given
        made.args, made.kwargs = fx.node.map_arg(given, lambda read: self._of(read, layer))
        self.place[made], self.at[place] = place, made
        if made.name != name:
            raise Unequal
        if twin is not None and node.op == "placeholder":
            made.meta = dict(twin.meta)
            return made
        made.meta = dict(node.meta)
        self._renumber(made.meta, layer)
        if node.name in layout.origin:
            theirs = mine = layout.origin[node.name]
            if theirs in layout.home:
                home, i = layout.home[theirs]
                mine = layout.run.layers[layout.shifted(home, layer)][i]
            for key in made.meta.keys() & _OF_ORIGIN:
                own = key.removeprefix("fwd_")
                if made.meta[key] == theirs.meta.get(own):
                    made.meta[key] = mine.meta.get(own)
            for key in () if is_backward(node) else _CHOSEN:
                if made.meta.get(key) == theirs.meta.get(key):
                    made.meta.pop(key, None)
                    made.meta.update({key: mine.meta[key]} if key in mine.meta else {})
            gone = theirs.meta.get("custom", {})
            rest = {k: v for k, v in node.meta["custom"].items() if k not in gone}
            made.meta["custom"] = {**mine.meta.get("custom", {}), **rest}
            layout.origin[name] = mine
        layout.order[name] = layout.order[node.name]  # to the layers of another run
        if twin is not None:
            made.meta["val"] = twin.meta["val"]
        else:
            self._set_values(made, node, lambda n: made if n is node else self._of(n, layer))
        return made

    def _set_values(self, node: fx.Node, like: fx.Node, instead: Callable[..., Any]) -> None:
        """Fakes like those of another node, in the memory `instead` of its owner's, if any."""
        owners = iter(self.owners[like])

        def value(fake: Any) -> Any:
            owner, i = next(owners) if isinstance(fake, torch.Tensor) else (None, 0)
            other = None if owner is None else instead(owner)
            if other is None:
                return fake
            return fake_in(fake, None if other is node else tensors_of(other)[i])

        if "val" in node.meta:
            node.meta["val"] = fx.node.map_aggregate(node.meta["val"], value)

    def _renumber(self, meta: dict[str, Any], layer: int) -> None:
        """Count the forward operators of what is added in front of an operator of that layer, in
        its number; of a sum of gradients, which counts all operators, all of what is added."""
        if "seq_nr" in meta:
            layer = layer if meta["seq_nr"] < self.layout.last else self.layout.end - 1
            meta["seq_nr"] += (layer - SECOND) * self.layout.period


def _compute_late(graph: fx.Graph, again: Collection[fx.Node]) -> None:
    """Put what is computed `again` in front of what reads it first, all parts of it: of what that
    lacks, in the order that it has, as the partitioner does, and so in the traced layers too."""
    position = {node: (node not in again, i) for i, node in enumerate(graph.nodes)}
    order: dict[fx.Node, None] = {}
    for node in [one for one in position if one not in again]:
        missing = reached([node], lambda one: [n for n in one.all_input_nodes if n not in order])
        for first in sorted(missing, key=position.__getitem__):
            order.setdefault(first)
            parts = (user for user in first.users if user.target is operator.getitem)
            order.update(dict.fromkeys(part for part in parts if part in again))
    for one, other in itertools.pairwise(order):
        if one.next is not other:
            one.append(other)
