"""Which tensors of a graph are alive when: storages, the views that share them, and last uses.

The rule is that of torch's graph interpreter: a value is freed after the node that reads it last,
and its memory with the last value that shares it. One walk over the graph, linear in its nodes.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autoshard.compiling import loss_arguments
from autoshard.passes import WAIT, start_of
from autoshard.planning import tensor_bytes
from autoshard.runtime import compat
from autoshard.runtime.host_memory import OFFLOAD
from autoshard.runtime.operators import CHUNKED_LOSS, scratch_of

aten = torch.ops.aten

# These return their input's memory, or may, though their schemas do not say which.
_SAME = (WAIT, aten._unsafe_view.default)
_PERHAPS = (aten.reshape.default, aten.contiguous.default, aten.flatten.using_ints)


TEMPORARIES = "temporaries"


class Storage:
    """The memory of one tensor and of its views. kind: what it is counted as."""

    __slots__ = ("kind", "nbytes")

    def __init__(self, nbytes: int, kind: str) -> None:
        self.nbytes, self.kind = nbytes, kind


Held = Mapping[fx.Node, tuple[Storage, ...]]
"""The storages of each node's value: none where it is an input somebody else keeps."""


def storages(graph: fx.Graph, given: Held, kind: str) -> dict[fx.Node, tuple[Storage, ...]]:
    """The storages of every node's value; new ones are of `kind`.

    given: those of the graph's inputs that the graph may free; other inputs have none.
    """
    parts: dict[fx.Node, list[tuple[Storage, ...]]] = {}  # of each element of a tuple
    found: dict[fx.Node, tuple[Storage, ...]] = {}
    for node in graph.nodes:
        if node.op != "call_function":
            found[node] = given.get(node, ())
            continue
        source = alias_of(node)
        if source is None or source.meta.get("val") is None:  # some wrappers do not say
            there = node.target is not OFFLOAD  # else in the host's memory
            parts[node] = [
                (Storage(_nbytes(leaf) * there, kind),) if isinstance(leaf, torch.Tensor) else ()
                for leaf in pytree.tree_leaves(node.meta.get("val"))
            ]
            found[node] = tuple(one for part in parts[node] for one in part)
        elif node.target is operator.getitem and source in parts:
            found[node] = parts[source][_index(node)]
        else:
            found[node] = found[source]
    return found


def scratch(node: fx.Node) -> list[Storage]:
    """What an operator makes and frees inside, where that is much and is known."""
    if node.target is not CHUNKED_LOSS:
        return []
    return [Storage(scratch_of(*loss_arguments(node)), TEMPORARIES)]


def _nbytes(leaf: torch.Tensor) -> int:
    """Bytes of a value; the state of random numbers does not tell its size."""
    if leaf.dtype == torch.uint8 and leaf.dim() == 1 and not isinstance(leaf.shape[0], int):
        return torch.get_rng_state().nbytes
    return tensor_bytes(leaf)


def alias_of(node: fx.Node) -> fx.Node | None:
    """The operand whose memory the node's value is (a view, an in-place result), if any."""
    if node.target is operator.getitem or node.target in _SAME:
        source = node.args[0]
        return source if isinstance(source, fx.Node) else None
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.returns:
        return None
    if node.target in _PERHAPS and not _shared(node, node.args[0]):
        return None
    result = schema.returns[0].alias_info
    if result is None:
        return None
    for index, argument in enumerate(schema.arguments):
        info = argument.alias_info
        # a list of views says only that it is one: its alias set is empty
        if info is not None and (not result.before_set or info.before_set & result.before_set):
            given = node.args[index] if index < len(node.args) else node.kwargs.get(argument.name)
            return given if isinstance(given, fx.Node) else None
    return None


class Change(NamedTuple):
    """One operator or kernel that runs: the storages it makes, and those freed after it."""

    name: str
    made: list[Storage]
    freed: list[Storage]


def walk(graph: fx.Graph, held: Held, inputs: Iterable[Storage] = ()) -> Iterator[Change]:
    """What each operator of a graph makes, and what is freed after it, in order.

    inputs: storages of the graph's inputs, freed after their last use. Storages that the output
    reads are never freed.
    """
    run = [node for node in graph.nodes if node.op in ("call_function", "output")]
    uses = [[*held.get(node, ()), *(s for n in read_by(node) for s in held[n])] for node in run]
    last = {storage: i for i, storages in enumerate(uses) for storage in storages}
    freed: list[list[Storage]] = [[] for _ in run]
    for storage, i in last.items():
        freed[i].append(storage)
    seen = set(inputs)
    for node, gone in zip(run, freed):
        if node.op == "call_function":
            made = [storage for storage in dict.fromkeys(held[node]) if storage not in seen]
            seen.update(made)
            inside = scratch(node)
            yield Change(node.name, made + inside, gone + inside)


def read_by(node: fx.Node) -> list[fx.Node]:
    """What must be there while the node runs: a collective reads its input until it is done."""
    reads = list(node.all_input_nodes)
    if node.target is WAIT:
        reads += read_by(start_of(node))
    return reads


def _shared(node: fx.Node, source: Any) -> bool:
    ours, theirs = node.meta.get("val"), source.meta.get("val")
    if not isinstance(ours, torch.Tensor) or not isinstance(theirs, torch.Tensor):
        return False
    return compat.same_storage(ours, theirs)


def _index(node: fx.Node) -> int:
    index = node.args[1]
    assert isinstance(index, int)
    return index
