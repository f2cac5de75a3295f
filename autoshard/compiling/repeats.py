"""A graph of equal layers that is traced with five of them, and its joint graph with all again.

    traced                               joint graph                      grown
    %x1 = layer(%x0, %w0)                forward 0 1 2 5 6                forward 0 1 2 3 4 5 6
    %x2 = layer(%x1, %w1)                backward 6 5 2 1 0               backward 6 5 4 3 2 1 0
    %x3 = layer(%x2, %w2)
    %x6 = layer(%x3, %w5)
    %x7 = layer(%x6, %w6)

What AOTAutograd makes of a layer depends on the metadata of what it reads, and backward of the
gradients that it gets. Layer 1 reads what layer 0 made, layer 2 what layer 1 made: where both come
out equal, so does each that follows; and backward likewise. Copies are those of layer 2, with
weights, module names and choices of recomputation of their own layers, and memory of their own.

Not done, the graph is traced whole: fewer than seven equal layers; a layer whose values are read
behind the next one; gradients that are accumulated in inputs; sizes that are symbols; operators
that write, or have graphs of their own; what is interleaved so that two layers come out unequal.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import fx

from autoshard.compiling.debugging import EQUAL_LAYERS, settings
from autoshard.compiling.stretches import described, label, symbols, tandem_repeats
from autoshard.runtime.compat import Short, Unequal, fake_in, is_backward, real_tensors, storage_key
from autoshard.runtime.graph_meta import COPY, PENDING_INPUTS

_SECOND = 2  # the layer that is copied
_FEWEST = _SECOND + 5  # fewer are traced: 0, 1, 2 and the last two, which may differ, are

_STACKS = {"nn_module_stack", "source_fn_stack", "fwd_nn_module_stack", "fwd_source_fn_stack"}
_OF_ORIGIN = {"stack_trace", "torch_fn", "recompute", "ac_graph_id"} | _STACKS  # see `_copy`

T = TypeVar("T")


class LayerPlace(NamedTuple):
    """Of a node of the joint graph: its layer, whether forward, backward or (None) an input that
    the layer alone reads, and which one among those."""

    layer: int
    backward: bool | None
    offset: int


_ELSEWHERE = LayerPlace(-1, None, 0)


class EqualLayers(NamedTuple):
    """Equal layers, one after another. own: inputs that each alone reads, from layer 1 on."""

    layers: Sequence[Sequence[fx.Node]]
    own: Sequence[Sequence[fx.Node]]


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

    def grow(joint: fx.Graph) -> None:
        placeholders = joint.find_nodes(op="placeholder")
        primals = [node for node in placeholders if "primals" in node.name]
        inputs = primals[len([*short.parameters(), *short.buffers()]) :]  # those come first
        called = [node.target for node in joint.nodes if node.op == "call_function"]
        whole = len(inputs) == len(given) and len(primals) < len(placeholders)  # has gradients
        if not whole or not all(map(_is_operator, called)):
            raise Unequal
        marks = {n: n.meta.get("custom", {}).get(COPY) for n in joint.nodes}
        origin = {n: nodes[mark] for n, mark in marks.items() if mark is not None}
        with real_tensors():
            for run in runs:
                _Growth(joint, dict(zip(given, inputs)), origin, run).grow()
        for node in origin:
            custom = {k: v for k, v in node.meta.pop("custom").items() if k != COPY}
            if custom:
                node.meta["custom"] = custom

    key = str([[number[node] for node in each] for each in firsts])
    return Short(short := _short(gm, runs), grow, key) if runs else None


def _own(layers: Sequence[Sequence[fx.Node]]) -> list[list[fx.Node]] | None:
    """The inputs that each layer alone reads; None where a layer after 1 does not read as it."""
    if not all(map(_is_pure, layers[0])):
        return None
    home = {node: (k, i) for k, nodes in enumerate(layers) for i, node in enumerate(nodes)}
    found: list[list[fx.Node]] = [[]]
    for k in range(_SECOND, len(layers)):
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
        found += [list(pairs)] if k == _SECOND else []
        if found[-1] != list(pairs) or len(set(pairs.values())) != len(pairs):
            return None
        found.append(list(pairs.values()))
    for k, (nodes, own) in enumerate(zip(layers, found)):
        users, readers = (
            {home.get(user, _ELSEWHERE)[0] for node in each for user in node.users}
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


def _writes(target: Any) -> bool:
    return hasattr(target, "_schema") and target._schema.is_mutable


def _is_pure(node: fx.Node) -> bool:
    """Whether a node writes to nothing, or is one of ours, of which the joint graph shows it."""
    ours = getattr(node.target, "__module__", "").startswith("autoshard.")
    known = node.op == "call_function" and (ours or _is_operator(node.target))
    return known and not _writes(node.target) and not symbols(node.meta.get("val"))


def _short(gm: fx.GraphModule, runs: Sequence[EqualLayers]) -> fx.GraphModule:
    """The graph without the layers between 2 and the last two, each node marked by its number."""
    gone = {node for run in runs for layer in run.layers[_SECOND + 1 : -2] for node in layer}
    second = {last: node for run in runs for last, node in zip(run.layers[-3], run.layers[_SECOND])}
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


class _Growth:
    """A joint graph, being grown by the layers of one run that are left out."""

    def __init__(
        self,
        graph: fx.Graph,
        inputs: Mapping[fx.Node, fx.Node],
        origin: dict[fx.Node, fx.Node],
        run: EqualLayers,
    ) -> None:
        self.graph, self.inputs, self.origin, self.run = graph, inputs, origin, run
        self.end = len(run.layers) - 2  # the first layer behind those that are left out
        self.after = {0: 1, 1: _SECOND, _SECOND: self.end, self.end: self.end + 1}
        self.nodes = [n for n in graph.nodes if n.op not in ("placeholder", "output")]
        self.home = {n: (k, i) for k, layer in enumerate(run.layers) for i, n in enumerate(layer)}
        self.place: dict[fx.Node, LayerPlace] = {}
        self.at: dict[LayerPlace, fx.Node] = {}
        for k, own in enumerate(run.own):
            for i, each in enumerate(own):
                self._put(inputs[each], LayerPlace(k, None, i))
        self.owners: dict[int, tuple[fx.Node, int]] = {}  # by memory: the first that is in it
        for node in graph.nodes:
            for i, value in enumerate(tensors_of(node)):
                self.owners.setdefault(storage_key(value), (node, i))

    def grow(self) -> None:
        """Compare, copy, and have the others read the copies; or `Unequal`, nothing changed."""
        above, below = self._lay_out()
        operators = [place for place in self.at if place.backward is not None]
        second = sorted(place for place in operators if place.layer == _SECOND)
        for place in second:
            self._compare(self.at[place._replace(layer=1)], self.at[place])
        reads, results = self._reads(above, below), self._results()
        counted = [node.meta.get("seq_nr", 0) for node in self.nodes if not is_backward(node)]
        begins = self.nodes.index(self.at[LayerPlace(_SECOND, False, 0)])
        self.last, self.period = counted[-1], max(counted[:above]) - max(counted[:begins])
        copied = range(_SECOND + 1, self.end)
        for backward, start in ((False, above), (True, below)):
            nodes = [self.at[place] for place in second if place.backward is backward]
            with self.graph.inserting_before(self.nodes[start] if nodes else None):
                for layer in reversed(copied) if backward else copied:
                    for node in nodes:
                        self._copy(node, layer)
        for reader, read, layer in reads:
            instead = self._of(read, layer)
            reader.replace_input_with(read, instead)
            self._set_values(reader, {read: instead})
        for i, node in enumerate(self.nodes):
            self._renumber(node.meta, self.end - 1 if above <= i < below else _SECOND)
        output: Any = self.graph.output_node()
        changed = {i: self._of(node, layer) for i, (node, layer) in results.items()}
        output.args = ([changed.get(i, node) for i, node in enumerate(output.args[0])],)

    def _lay_out(self) -> tuple[int, int]:
        """Give nodes their places, by the first one of each layer, forward and backward. The
        positions in front of which layers are missing."""
        first: dict[tuple[bool, int], int] = {}
        for i, node in enumerate(self.nodes):
            layer, _ = self.home.get(self.origin.get(node), (-1, 0))  # type: ignore[arg-type]
            first.setdefault((is_backward(node), layer), i)
        end = len(self.nodes)
        one, two, above = (first.get((False, k), end) for k in (1, _SECOND, self.end))
        below, under = (first.get((True, k), end) for k in (_SECOND, 1))
        if not one < two < above < end or two - one != above - two:
            raise Unequal
        self._place(False, (0, 1, _SECOND, self.end), one, two - one)
        if below < under < end:
            self._place(True, (self.end, _SECOND, 1, 0), below, under - below)
        elif below != under:
            raise Unequal
        return above, below

    def _place(self, backward: bool, layers: Sequence[int], second: int, period: int) -> None:
        """The places of four layers, of which the second begins there. Of the first and the last of
        them, which may differ, only what may be theirs."""
        begins = dict(zip(layers, range(second - period, second + 3 * period, period)))
        for layer in (1, _SECOND, 0, self.end):
            start, sure = begins[layer], layer in (1, _SECOND)
            span = self.nodes[max(start, 0) : start + period]
            if sure and (len(span) < period or not self.place.keys().isdisjoint(span)):
                raise Unequal
            for i, node in enumerate(span, max(-start, 0)):
                known = self.home.get(self.origin.get(node), _ELSEWHERE)[0]  # type: ignore[arg-type]
                may = node not in self.place and (known == layer or node not in self.origin)
                if sure or may:
                    self._put(node, LayerPlace(layer, backward, i))

    def _put(self, node: fx.Node, place: LayerPlace) -> None:
        self.place[node], self.at[place] = place, node

    def _compare(self, one: fx.Node, other: fx.Node) -> None:
        """Raise `Unequal` unless a node does in layer 2 what one does in layer 1."""
        args = fx.node.map_arg((one.args, dict(one.kwargs)), self._next)
        a, b = (self.origin.get(node) for node in (one, other))
        layer, i = self.home.get(a, (-1, -1))  # type: ignore[arg-type]
        alike = (
            one.op == other.op == "call_function"
            and one.target == other.target
            and args == (other.args, dict(other.kwargs))
            and described(one.meta.get("val"), True) == described(other.meta.get("val"), True)
            and one.meta.keys() == other.meta.keys()
            and is_backward(one) == is_backward(other)
            and (a is b or (self.after.get(layer, -1), i) == self.home.get(b))  # type: ignore[arg-type]
        )
        if not alike or _writes(one.target):
            raise Unequal
        for j, (mine, theirs) in enumerate(zip(tensors_of(one), tensors_of(other))):
            owner, i = self.owners[storage_key(mine)]
            shared = owner is one and i != j  # results in one memory, which is their own
            if shared or (self._next(owner), i) != self.owners[storage_key(theirs)]:
                raise Unequal

    def _next(self, node: Any) -> Any:
        """What is to the layer after it what a node is to its own."""
        place = self.place.get(node, _ELSEWHERE)
        known = place is not _ELSEWHERE
        return self.at.get(place._replace(layer=self.after.get(place.layer, -1))) if known else node

    def _reads(self, above: int, below: int) -> list[tuple[fx.Node, fx.Node, int]]:
        """A node, what it reads or is a view of, and the layer to which it reads as to layer 2."""
        found = []
        for i, node in enumerate(self.nodes[above:], above):
            mine = self.place.get(node, _ELSEWHERE).layer
            memory = [self.owners[storage_key(value)][0] for value in tensors_of(node)]
            for read in dict.fromkeys((*node.all_input_nodes, *memory)):
                layer = self.place.get(read, _ELSEWHERE).layer
                behind = i < below  # in the last layers, or what comes after them
                if (behind and layer == 1) or (not behind and mine not in (1, 2) and layer == 2):
                    raise Unequal
                if behind and layer == _SECOND:
                    found.append((node, read, self.end - 1))
                elif not behind and mine == _SECOND and layer == self.end:
                    found.append((node, read, _SECOND))
        return found

    def _results(self) -> dict[int, tuple[Any, int]]:
        """Results that change: the gradients of each layer's own inputs are to it what those of
        layer 2's are to layer 2."""
        results: Any = self.graph.output_node().args[0]
        before = len(results) - len(self.inputs)
        slot = {self.place.get(n, n): before + i for i, n in enumerate(self.inputs.values())}
        found: dict[int, tuple[Any, int]] = {}
        for place in [p for p in self.at if p.layer == _SECOND and p.backward is None]:
            node = results[slot[place]]
            if self._next(results[slot[place._replace(layer=1)]]) is not node:
                raise Unequal
            for layer in range(_SECOND, self.end):
                found[slot[place._replace(layer=layer)]] = (node, layer)
            end = slot[place._replace(layer=self.end)]
            if self.place.get(results[end], _ELSEWHERE).layer == _SECOND:
                found[end] = (results[end], self.end - 1)
        for i, node in enumerate(results):
            layer = self.place.get(node, _ELSEWHERE).layer
            if i not in found and (layer == _SECOND or (layer == 1 and i < before)):
                raise Unequal
        return found

    def _shifted(self, home: int, layer: int) -> int:
        """The layer that is to one as a traced one is to layer 2."""
        return layer + (home - _SECOND if home <= _SECOND else home - self.end + 1)

    def _of(self, node: Any, layer: int) -> Any:
        """What is to a layer what a node is to layer 2."""
        place = self.place.get(node, _ELSEWHERE)
        known = place is not _ELSEWHERE
        return self.at[place._replace(layer=self._shifted(place.layer, layer))] if known else node

    def _copy(self, node: fx.Node, layer: int) -> None:
        given = (node.args, dict(node.kwargs))
        args, kwargs = fx.node.map_arg(given, lambda read: self._of(read, layer))
        made = self.graph.create_node(node.op, node.target, args, kwargs, name=node.name)
        self._put(made, self.place[node]._replace(layer=layer))
        made.meta = dict(node.meta)
        self._renumber(made.meta, layer)
        if node in self.origin:
            self.origin[made] = theirs = mine = self.origin[node]
            if theirs in self.home:
                home, i = self.home[theirs]
                self.origin[made] = mine = self.run.layers[self._shifted(home, layer)][i]
            for key in made.meta.keys() & _OF_ORIGIN:
                own = key.removeprefix("fwd_")
                if made.meta[key] == theirs.meta.get(own):
                    made.meta[key] = mine.meta.get(own)
            gone = theirs.meta.get("custom", {})
            rest = {k: v for k, v in node.meta["custom"].items() if k not in gone}
            made.meta["custom"] = {**mine.meta.get("custom", {}), **rest}
        owners = {self.owners[storage_key(value)][0] for value in tensors_of(node)}
        self._set_values(made, {n: made if n is node else self._of(n, layer) for n in owners})

    def _set_values(self, node: fx.Node, instead: Mapping[fx.Node, fx.Node]) -> None:
        """Fakes of a node in the memory of another one; of its own, where that is itself."""

        def value(fake: Any) -> Any:
            is_tensor = isinstance(fake, torch.Tensor)
            owner, i = self.owners[storage_key(fake)] if is_tensor else (None, 0)
            if owner is None or owner not in instead:
                return fake
            return fake_in(fake, None if instead[owner] is node else tensors_of(instead[owner])[i])

        if "val" in node.meta:
            node.meta["val"] = fx.node.map_aggregate(node.meta["val"], value)

    def _renumber(self, meta: dict[str, Any], layer: int) -> None:
        """Count the forward operators of what is added in front of an operator of that layer, in
        its number; of a sum of gradients, which counts all operators, all of what is added."""
        if "seq_nr" in meta:
            layer = layer if meta["seq_nr"] < self.last else self.end - 1
            meta["seq_nr"] += (layer - _SECOND) * self.period


def tensors_of(node: fx.Node) -> list[torch.Tensor]:
    """The fakes of what a node makes."""
    val = node.meta.get("val")
    values = val if isinstance(val, (list, tuple)) else (val,)
    return [each for each in values if isinstance(each, torch.Tensor)]
