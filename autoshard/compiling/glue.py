"""What of a graph is of no stretch: constants, buckets, views for backward, writes to inputs."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from autoshard.passes import COLLECTIVES, WAIT, aten
from autoshard.planning import packet, reached
from autoshard.runtime.compat import size_symbols


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


def symbols(val: Any) -> set[str]:
    """The names of the symbols in the sizes of a value."""
    sizes: list[Any] = [val]
    if isinstance(val, torch.Tensor):
        sizes = [*val.shape, *val.stride(), val.storage_offset()]
    elif isinstance(val, (list, tuple)):
        return {name for one in val for name in symbols(one)}
    return {str(s) for n in sizes if isinstance(n, torch.SymInt) for s in size_symbols(n)}


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
