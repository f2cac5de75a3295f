"""The forward and the backward of a step as storages that are made and freed, by kind.

Two programs run them: AOTAutograd's graphs, operator by operator, or the code
that Inductor generates, whose own memory plan is read.

Which tensors of a graph are alive when: storages, the views that share them, and last uses.

The rule is that of torch's graph interpreter: a value is freed after the node that reads it last,
and its memory with the last value that shares it. One walk over the graph, linear in its nodes.
"""

import operator
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autoshard.compiling import loss_arguments
from autoshard.passes import GATHERS, WAIT, BucketGradients, BucketParameters, start_of
from autoshard.planning import is_view, tensor_bytes
from autoshard.runtime import compat
from autoshard.runtime.compat import ForwardBackward, InductorGraph, InductorStep
from autoshard.runtime.graph_meta import PASS
from autoshard.runtime.host_memory import OFFLOAD
from autoshard.runtime.operators import CHUNKED_LOSS, scratch_of
from autoshard.runtime.parameters import keeps_storage

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
            index: Any = node.args[1]
            found[node] = parts[source][index]
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


PARAMETERS, GRADIENTS, OPTIMIZER = "parameters", "gradients", "optimizer"
BUFFERS, ACTIVATIONS, GATHERED = "buffers", "activations", "gathered"
OUTPUTS, PENDING = "outputs", "pending"
KINDS = (
    PARAMETERS, GRADIENTS, OPTIMIZER, BUFFERS, ACTIVATIONS, GATHERED, TEMPORARIES, OUTPUTS, PENDING
)  # fmt: skip

_BUCKETS = (BucketParameters.name, BucketGradients.name)

Storages = tuple[Storage, ...]


@dataclass(frozen=True, kw_only=True)
class Phases:
    """What both graphs of a step make and free.

    backward: None where nothing needs a gradient. saved: kept from the forward for the backward.
    tangents: bytes of the gradients of the results, there when the backward begins. copied: bytes
    of gradients that are copied out of larger storages at the end of the backward.
    """

    forward: list[Change]
    backward: list[Change] | None = None
    saved: frozenset[Storage] = field(default_factory=frozenset)
    tangents: int = 0
    copied: int = 0


@dataclass(frozen=True)
class _Lifetimes:
    """One graph. results: the storages of each. named: those of each node's value, by its name."""

    changes: list[Change]
    results: list[Storages]
    named: Mapping[str, Storages]


def phases(
    graphs: ForwardBackward | InductorStep, positions: Container[int], held: bool = False
) -> Phases:
    """The phases of a step; `positions`: of the parameters among the inputs. held: whether the
    gradients of the results are there until the backward ends, and not until their last use."""
    first, second = graphs.forward, graphs.backward
    forward = _lifetimes(first, {})
    graph = first.graph
    inputs = [node.name for node in graph.find_nodes(op="placeholder")]
    weights = {name for i, name in enumerate(inputs) if i in positions}
    results = [node.name if node is not None else "" for node in _results(graph)]
    if isinstance(first, InductorGraph):
        results = list(first.names)
    asked = [] if second is None else second.graph.find_nodes(op="placeholder")
    wanted = {node.name for node in asked}
    # by the name it has in the backward; the caller keeps inputs, so that they have no storage
    known: dict[str, Storages] = dict.fromkeys(inputs, ())
    known |= {name: held for name, held in zip(results, forward.results) if name not in known}
    saved = frozenset(s for name, held in known.items() if name in wanted for s in held)
    _mark((s for held in forward.results for s in held), OUTPUTS)
    _mark(saved, ACTIVATIONS)
    _mark(_gathered(graph, weights, forward), GATHERED)
    if second is None:
        return Phases(forward=forward.changes, saved=saved)
    tangents = {
        # one that the loss does not depend on is made, of zeros
        node.name: (Storage(tensor_bytes(node.meta["val"]), TEMPORARIES),)
        for node in asked
        if node.name not in known
    }
    given = {name: known[name] for name in wanted & known.keys()}
    backward = _lifetimes(second, given if held else given | tangents)
    _mark(_gathered(second.graph, weights, backward), GATHERED)
    kept, copied = _handed_out(_results(second.graph), backward.results)
    _mark(kept, GRADIENTS)
    return Phases(
        forward=forward.changes,
        backward=backward.changes,
        saved=saved,
        tangents=sum(s.nbytes for held in tangents.values() for s in held),
        copied=copied,
    )


def _lifetimes(made: fx.GraphModule | InductorGraph, given: Mapping[str, Storages]) -> _Lifetimes:
    """given: storages of the graph's inputs that it may free."""
    if isinstance(made, InductorGraph):
        return _of_code(made, given)
    graph = made.graph
    read = {n: given.get(n.name, ()) for n in graph.find_nodes(op="placeholder")}
    held = storages(graph, read, TEMPORARIES)
    results = [held[node] if node is not None else () for node in _results(graph)]
    inputs = {s for storages_ in given.values() for s in storages_}
    return _Lifetimes(
        list(walk(graph, held, inputs)), results, {node.name: held[node] for node in held}
    )


def _of_code(plan: InductorGraph, given: Mapping[str, Storages]) -> _Lifetimes:
    buffers: dict[str, Storages] = dict(given)
    names = Counter(storage for held in given.values() for storage in held)
    changes = []
    inside: dict[str, list[Storage]] = {}  # of operators, by the first buffer that each leaves
    for node in plan.graph.nodes:
        if own := scratch(node):
            own_results = {user.name for user in node.users}
            inside[next(b for b, name in plan.origins.items() if name in own_results)] = own
    for kernel in plan.kernels:
        made = [Storage(nbytes, TEMPORARIES) for nbytes in kernel.made.values()]
        buffers.update((name, (storage,)) for name, storage in zip(kernel.made, made))
        names.update(made)
        freed = [one for name in kernel.made for one in inside.get(name, ())]
        made += freed
        for storage in (s for buffer in kernel.freed for s in buffers.get(buffer, ())):
            names[storage] -= 1  # views of one storage are inputs by several names
            if not names[storage]:
                freed.append(storage)
        changes.append(Change(kernel.name, made, freed))
    results = [buffers.get(owner or "", ()) for owner in plan.results]
    named: dict[str, Storages] = {}
    for buffer, node in plan.origins.items():
        named[node] = (*named.get(node, ()), *buffers[buffer])
    return _Lifetimes(changes, results, named)


def _handed_out(gradients: list[fx.Node | None], held: list[Storages]) -> tuple[list[Storage], int]:
    """Storages that become gradients as they are, and the bytes of gradients that are copied."""
    pairs = [(node.meta["val"], own) for node, own in zip(gradients, held) if node is not None]
    used: Counter[Storage] = Counter()
    for val, own in pairs:
        used.update(dict.fromkeys(own, tensor_bytes(val)))
    kept: dict[Storage, None] = {}
    copied = 0
    for val, own in pairs:
        if val.is_contiguous() and all(keeps_storage(used[s], s.nbytes) for s in own):
            kept.update(dict.fromkeys(own))
        else:
            copied += tensor_bytes(val)
    return list(kept), copied


def _results(graph: fx.Graph) -> list[fx.Node | None]:
    found: Any = graph.output_node().args[0]
    return [n if isinstance(n, fx.Node) else None for n in found]


def _mark(found: Iterable[Storage], kind: str) -> None:
    for storage in found:
        storage.kind = kind


def _gathered(graph: fx.Graph, weights: Container[str], made: _Lifetimes) -> list[Storage]:
    """Weights made whole from what this rank and others store, and buckets of gradients.

    weights: names of the graph's inputs that are stored parameters.
    """
    found: dict[fx.Node, None] = {}
    stored: set[fx.Node] = set()
    for node in graph.nodes:
        sources = node.all_input_nodes
        if (node.meta.get("custom") or {}).get(PASS) in _BUCKETS:
            found[node] = None
        elif sources and is_view(node) and all(n in found for n in sources):
            found[node] = None  # Inductor may lay a weight out anew as it takes it from its bucket
        elif node.op == "placeholder" and node.name in weights:
            stored.add(node)
        elif node.op == "call_function" and sources and all(n in stored for n in sources):
            # until it is gathered, a weight may be padded or cast
            if node.target in GATHERS:
                found[node] = None
            else:
                stored.add(node)
    return [storage for node in found for storage in made.named.get(node.name, ())]
