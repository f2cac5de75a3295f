"""Where equal stretches of a graph lie: its tandem repeats, and the best cut between them.

Any cut of a periodic list is periodic, so the one is taken that the fewest bytes cross, and, where
it can be, no view with gaps or collective under way. What lies among the operators of a stretch and
is of a bucket of parameters or gradients, which ends anywhere, runs before or after it; collectives
of a process group stay in their order.
"""

from __future__ import annotations

import itertools
import operator
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from autoshard.capture import label, symbols, tandem_repeats
from autoshard.passes import COLLECTIVES, WAIT, aten
from autoshard.planning import packet, reached
from autoshard.planning.cost import hint
from autoshard.runtime.collectives import EXCHANGES, FUSED_PRODUCTS
from autoshard.runtime.operators import CHUNKED_LOSS


class PartsInOrder:
    """Where each operator of a graph runs: in a stretch, or in the gaps between them."""

    def __init__(self, graph: fx.Graph) -> None:
        self.nodes = [n for n in graph.nodes if n.op not in ("placeholder", "output")]
        self.position = {node: i for i, node in enumerate(self.nodes)}
        self.constants = constants_of(self.nodes)
        self.copies = {n for n in self.nodes if writes_input(n)}
        self.apart = apart_of(self.nodes) - self.constants - self.copies
        self.tails = tails_of(self.nodes) - self.apart
        away = self.constants | self.copies | self.apart | self.tails
        self.core = [n for n in self.nodes if n not in away and not is_seed(n)]

    def slots(self) -> list[list[fx.Node]] | None:
        """The operators by part, in the order of the graph within each."""
        if any(is_from_data(node) for node in self.nodes):
            return None
        runs = tandem_repeats([label(node) for node in self.core])
        if not runs:
            return None
        bounds = self._bounds(runs)
        for apart in (self.apart, set[fx.Node]()):
            slot = self._slot(bounds, apart)
            order = sorted(slot, key=lambda node: (slot[node], self.position[node]))
            if _same_order(self.nodes, order):
                break
        else:
            return None
        stretches = {2 * i + 1 for i, is_stretch in enumerate(bounds.values()) if is_stretch}
        found: list[list[fx.Node]] = []
        before: tuple[Any, ...] = ()
        for node in order:
            at = (slot[node],) if slot[node] in stretches else ()
            if not found or at != before:
                found.append([])
            found[-1].append(node)
            before = at
        return found

    def _bounds(self, runs: Sequence[tuple[int, int, int]]) -> dict[int, bool]:
        """The first operator of each segment of `core`, and whether the segment is a stretch."""
        costs = self._costs()
        found = {0: False}
        for start, period, count in runs:
            middle = start + period * (count // 2)
            shift = min(range(period), key=lambda i: (costs[middle + i], i))
            whole = count - (shift > 0)
            for i in range(whole):
                found[start + shift + i * period] = True
            found[start + shift + whole * period] = False
        return {i: found[i] for i in sorted(found) if i < len(self.core)}

    def _costs(self) -> list[int]:
        """What crosses a cut before each operator of `core`."""
        index = {node: i for i, node in enumerate(self.core)}
        change = [0] * (len(self.core) + 1)
        for i, node in enumerate(self.core):
            last = max((index[user] for user in node.users if user in index), default=i)
            change[i + 1] += (cost := _cost(node))
            change[last + 1 if last > i else i + 1] -= cost
        return list(itertools.accumulate(change))

    def _slot(self, bounds: Mapping[int, bool], apart: Collection[fx.Node]) -> dict[fx.Node, int]:
        """By operator: 2 i + 1 in segment i, 2 i before it."""
        starts = {self.core[i]: n for n, i in enumerate(bounds)}
        stretch = list(bounds.values())
        segment, slot = 0, dict[fx.Node, int]()
        staying: set[tuple[int, Any]] = set()  # groups with a collective that is not moved up
        for node in self.nodes:
            segment = starts.get(node, segment)
            if node in self.constants or node in self.copies:
                continue
            slot[node] = 2 * segment + 1
            source = max((slot.get(one, 0) for one in node.all_input_nodes), default=0)
            if node.target is operator.getitem:
                slot[node] = slot[node.all_input_nodes[0]]
            elif is_seed(node) or (node in self.tails and source):
                slot[node] = source
            elif node in apart and stretch[segment] and source <= 2 * segment:
                place = (segment, node.args[-1]) if node.target in COLLECTIVES else None
                if place not in staying:
                    unpacks = source and place is None and node.target is not WAIT
                    slot[node] = source if unpacks else 2 * segment
            if node.target in COLLECTIVES and slot[node] % 2:
                staying.add((segment, node.args[-1]))
        for node in reversed(self.nodes):
            if node not in apart or node.target is operator.getitem:
                continue
            at = slot[node]
            later = all(slot.get(user, at + 1) > at for user in readers(node))
            if at % 2 and stretch[at // 2] and later:
                slot[node] = at + 1
                for user in node.users:
                    if user.target is operator.getitem:
                        slot[user] = at + 1
        for node in self.copies:  # where the input and what is written to it are last read
            reads = [node.args[0], *views_of(node.args[0]), node.args[1]]
            users = [u for one in reads for u in one.users if u in slot]  # type: ignore[union-attr]
            slot[node] = max(slot[each] for each in [*users, *node.all_input_nodes] if each in slot)
        return slot


def _cost(node: fx.Node) -> int:
    """Of a cut that a value crosses: its bytes; more than any of what is best not cut."""
    val = node.meta.get("val")
    if not isinstance(val, torch.Tensor):
        return 1 << 60
    sizes = [hint(size) for size in val.shape]
    strides = [hint(stride) for stride in val.stride()]
    held = 1
    for size, stride in sorted(zip(sizes, strides), key=lambda one: one[1]):
        if size > 1 and stride != held:
            return 1 << 50
        held *= size
    under_way = node.target in COLLECTIVES
    return held * val.element_size() + 4096 + (under_way << 40)


def _same_order(before: Sequence[fx.Node], after: Sequence[fx.Node]) -> bool:
    """Whether the collectives of each process group are in the order that they had."""

    def sequences(nodes: Sequence[fx.Node]) -> dict[Any, list[fx.Node]]:
        found: dict[Any, list[fx.Node]] = defaultdict(list)
        whole = [
            n
            for n in nodes
            if n.target in (*COLLECTIVES, *EXCHANGES, *FUSED_PRODUCTS, CHUNKED_LOSS)
        ]
        groups = {node.args[-1] for node in whole if node.target in COLLECTIVES}
        for node in whole:
            mine = [node.args[-1]] if node.target in COLLECTIVES else groups
            for group in mine:
                found[group].append(node)
        return found

    return sequences(before) == sequences(after)


# What of a graph is of no stretch: constants, buckets, views for backward, writes to inputs.


def constants_of(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """Values of no tensor, which are cheaper to make than to hand on."""
    found: set[fx.Node] = set()
    for node in nodes:
        number = isinstance(node.meta.get("val"), (int, float, bool, torch.SymInt, torch.SymBool))
        makes = node.op == "get_attr" or packet(node) in _MAKERS or number
        of_sizes = all(n in found or _is_size(n) for n in node.all_input_nodes)
        if makes and node.users and of_sizes:
            found.add(node)
    ends = {node for node in found if any(_keeps(user) for user in node.users)}
    return found - ends


def _is_size(node: fx.Node) -> bool:
    return node.op == "placeholder" and not isinstance(node.meta.get("val"), torch.Tensor)


def _keeps(user: fx.Node) -> bool:
    return user.op == "output" or user.target in COLLECTIVES


def apart_of(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """What fetches inputs over the mesh, and what takes results there."""
    fetched: set[fx.Node] = set()
    for node in nodes:
        sources = node.all_input_nodes
        if _carries(node, _UNPACK) and all(n in fetched or _is_only_read(n) for n in sources):
            fetched.add(node)
    given: set[fx.Node] = set()
    for node in reversed(nodes):
        if _carries(node, _PACK) and all(n.op == "output" or n in given for n in readers(node)):
            given.add(node)
    return _connected(fetched, nodes) | _connected(given, nodes)


def _is_only_read(node: fx.Node) -> bool:
    """Whether a node is an input that nothing writes to but a copy at the end."""
    written = [user for user in node.users if getattr(user.target, "_schema", None) is not None]
    return node.op == "placeholder" and all(
        writes_input(user) or not user.target._schema.is_mutable  # type: ignore[union-attr]
        for user in written
    )


def _connected(among: set[fx.Node], nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """What of `among` a collective of it reads, or what reads that."""
    starts = [node for node in nodes if node in among and node.target in COLLECTIVES]

    def sources(node: fx.Node) -> list[fx.Node]:
        # not what is summed: it is larger than the sum
        return [n for n in node.all_input_nodes if n in among and packet(n) is not aten.sum]

    after = reached(starts, lambda node: among.intersection(node.users))
    return {*after, *reached(starts, sources)}


def tails_of(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """Views that nobody reads but backward, which AOTAutograd puts at the end of a forward."""
    found: set[fx.Node] = set()
    for node in reversed(nodes):
        is_view = getattr(node.target, "is_view", False)
        if is_view and all(user.op == "output" or user in found for user in node.users):
            found.add(node)
    return found


def _carries(node: fx.Node, among: Collection[Any]) -> bool:
    return node.target in (*COLLECTIVES, WAIT, operator.getitem) or packet(node) in among


def readers(node: fx.Node) -> Iterator[fx.Node]:
    """Those who read a value, of what makes several the readers of each."""
    for user in node.users:
        if user.target is operator.getitem:
            yield from readers(user)
        else:
            yield user


def views_of(node: Any) -> Iterator[fx.Node]:
    for user in node.users:
        if user.args and user.args[0] is node and getattr(user.target, "is_view", False):
            yield user
            yield from views_of(user)


def writes_input(node: fx.Node) -> bool:
    first: Any = node.args[0] if node.args else None
    is_copy = node.target is aten.copy_.default and not node.users
    return is_copy and isinstance(first, fx.Node) and first.op == "placeholder"


def is_seed(node: fx.Node) -> bool:
    """Whether a node takes one of the seeds that Inductor draws at once, by its number."""
    return str(node.target) == "prims.inductor_lookup_seed.default"


def is_from_data(node: fx.Node) -> bool:
    return any(name.startswith("u") for name in symbols(node.meta.get("val")))


_UNPACK = {
    aten.reshape,
    aten.view,
    aten.slice,
    aten.select,
    aten.split,
    aten.split_with_sizes,
    aten.cat,
    aten.constant_pad_nd,
    aten._to_copy,
    torch.ops.prims.convert_element_type,
}
_PACK = {*_UNPACK, aten.permute, aten.div, aten.sum}
_MAKERS = {aten.full, aten.scalar_tensor, aten.zeros, aten.ones, aten.arange, torch.ops.prims.iota}
