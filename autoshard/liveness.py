"""Which tensors of a graph are alive when: storages, the views that share them, and last uses.

The rule is that of torch's graph interpreter and of Inductor's wrapper code: a value is freed after
the node that reads it last, and its memory with the last value that shares it. One walk over the
graph, linear in its nodes.
"""

from __future__ import annotations

import operator
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

from autoshard.planning.values import tensor_bytes

aten = torch.ops.aten
_c10d = torch.ops._c10d_functional

# These return their input's memory, or may, though their schemas do not say which.
_SAME = (_c10d.wait_tensor.default, aten._unsafe_view.default)
_PERHAPS = (aten.reshape.default, aten.contiguous.default, aten.flatten.using_ints)


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
            parts[node] = [
                (Storage(tensor_bytes(leaf), kind),) if isinstance(leaf, torch.Tensor) else ()
                for leaf in pytree.tree_leaves(node.meta.get("val"))
            ]
            found[node] = tuple(one for part in parts[node] for one in part)
        elif node.target is operator.getitem and source in parts:
            found[node] = parts[source][_index(node)]
        else:
            found[node] = found[source]
    return found


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


@dataclass(frozen=True)
class Kernel:
    """One thing that runs: what it reads and what it writes. loop: it may write over what it reads
    element by element."""

    node: fx.Node
    reads: tuple[Storage, ...]
    writes: tuple[Storage, ...]
    loop: bool = False


def kernels(graph: fx.Graph, held: Held) -> list[Kernel]:
    """Every node of a graph that runs operator by operator, in order."""
    return [
        Kernel(node, tuple(s for n in read_by(node) for s in held[n]), held[node])
        for node in graph.nodes
        if node.op in ("call_function", "output")
    ]


class Change(NamedTuple):
    """What a step does: storages that are gone before it, that it makes, and gone after it."""

    node: fx.Node
    taken: list[Storage]
    made: list[Storage]
    freed: list[Storage]


def walk(
    run: Sequence[Kernel], inputs: Iterable[Storage] = (), foreign: Container[Storage] = ()
) -> Iterator[Change]:
    """The changes of what runs, in order, the output's aside.

    inputs: storages of the graph's inputs, freed after their last use. Storages that the output
    reads are never freed. A loop takes the memory of what it reads last for a result as large,
    unless that is `foreign`.
    """
    last: dict[Storage, int] = {}
    for i, kernel in enumerate(run):
        for storage in (*kernel.reads, *kernel.writes):
            last[storage] = i
    gone: list[list[Storage]] = [[] for _ in run]
    for storage, i in last.items():
        gone[i].append(storage)
    seen = set(inputs)
    for kernel, freed in zip(run, gone):
        if kernel.node.op != "call_function":
            continue
        made = [s for s in dict.fromkeys(kernel.writes) if s not in seen]
        seen.update(made)
        taken: list[Storage] = []
        if kernel.loop:
            dead = [s for s in freed if s in kernel.reads and s not in foreign]
            for new in made:
                taken += [s for s in dead if s.nbytes == new.nbytes and s not in taken][:1]
        yield Change(kernel.node, taken, made, [s for s in freed if s not in taken])


def read_by(node: fx.Node) -> list[fx.Node]:
    """What must be there while the node runs: a collective reads its input until it is done."""
    reads = list(node.all_input_nodes)
    if node.target is _c10d.wait_tensor.default:
        for source in node.all_input_nodes:
            collective = source.all_input_nodes[0] if source.target is operator.getitem else source
            reads += read_by(collective)
    return reads


def _shared(node: fx.Node, source: Any) -> bool:
    ours, theirs = node.meta.get("val"), source.meta.get("val")
    if not isinstance(ours, torch.Tensor) or not isinstance(theirs, torch.Tensor):
        return False
    return StorageWeakRef(ours.untyped_storage()) == StorageWeakRef(theirs.untyped_storage())


def _index(node: fx.Node) -> int:
    index = node.args[1]
    assert isinstance(index, int)
    return index
