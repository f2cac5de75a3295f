"""Which tensors of a graph are alive when: storages, the views that share them, and last uses.

The rule is that of torch's graph interpreter and of Inductor's wrapper code: a value is freed after
the node that reads it last, and its memory with the last value that shares it. One walk over the
graph, linear in its nodes.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autoshard.passes import WAIT, start_of
from autoshard.planning import tensor_bytes
from autoshard.runtime import compat

aten = torch.ops.aten

# These return their input's memory, or may, though their schemas do not say which.
_SAME = (WAIT, aten._unsafe_view.default)
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
    """One thing that runs: what it reads and what it writes.

    loop: elements it runs over, and how many results a reduction in it has: 0 where there is none,
    negative where it reduces others than the last dims. (0, 0): no loop. planned: its results may
    be in memory that was used before. joined: one call with the loop before it, so that what either
    reads is there until both are done. parts: the loops fused to this one, what each reads and
    writes, with what is never stored.
    """

    node: fx.Node
    reads: tuple[Storage, ...]
    writes: tuple[Storage, ...]
    loop: tuple[int, int] = (0, 0)
    planned: bool = False
    joined: bool = False
    parts: tuple[tuple[tuple[Storage, ...], tuple[Storage, ...]], ...] = ()


def kernels(graph: fx.Graph, held: Held) -> list[Kernel]:
    """Every node of a graph that runs operator by operator, in order."""
    return [
        Kernel(node, tuple(s for n in read_by(node) for s in held[n]), held[node])
        for node in graph.nodes
        if node.op in ("call_function", "output")
    ]


class Change(NamedTuple):
    """What a kernel does: storages whose memory it takes, that it makes, and that are freed."""

    node: fx.Node
    taken: list[Storage]
    made: list[Storage]
    freed: list[Storage]


def walk(
    run: Sequence[Kernel],
    inputs: Iterable[Storage] = (),
    reused: Mapping[Storage, Storage] | None = None,
) -> Iterator[Change]:
    """The changes of the kernels, in order, the output's aside.

    inputs: storages of the graph's inputs, freed after their last use. Storages that the output
    reads are never freed. reused: by storage, the dead one whose memory it is made in; that one is
    not freed before.
    """
    reused = reused or {}
    kept = set(reused.values())
    seen = set(inputs)
    for kernel, freed in zip(run, freed_after(run)):
        if kernel.node.op == "call_function":
            made = [s for s in dict.fromkeys(kernel.writes) if s not in seen]
            seen.update(made)
            taken = [reused[s] for s in made if s in reused]
            yield Change(kernel.node, taken, made, [s for s in freed if s not in kept])


def last_uses(run: Sequence[Kernel]) -> dict[Storage, int]:
    """The position of the last kernel that reads or writes each storage."""
    return {s: i for i, kernel in enumerate(run) for s in (*kernel.reads, *kernel.writes)}


def freed_after(run: Sequence[Kernel]) -> list[list[Storage]]:
    """The storages that nobody needs after each kernel."""
    gone: list[list[Storage]] = [[] for _ in run]
    for storage, i in last_uses(run).items():
        while i + 1 < len(run) and run[i + 1].joined:
            i += 1
        gone[i].append(storage)
    return gone


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
