"""The forward and the backward of a step as storages that are made and freed, by kind.

Two programs run them: AOTAutograd's graphs, operator by operator (memory/liveness.py), or the code
that Inductor generates, whose own memory plan is read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field

from torch import fx

from autoshard.memory.liveness import TEMPORARIES, Change, Storage, scratch, storages, walk
from autoshard.passes import GATHERS, BucketGradients, BucketParameters
from autoshard.planning import is_view, tensor_bytes
from autoshard.runtime.compat import ForwardBackward, InductorGraph, InductorStep
from autoshard.runtime.graph_meta import PASS
from autoshard.runtime.parameters import keeps_storage

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
    inputs = [node.name for node in graph.nodes if node.op == "placeholder"]
    weights = {name for i, name in enumerate(inputs) if i in positions}
    results = [node.name if node is not None else "" for node in _results(graph)]
    if isinstance(first, InductorGraph):
        results = list(first.names)
    wanted = set() if second is None else {node.name for node in _placeholders(second.graph)}
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
        for node in _placeholders(second.graph)
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
    held = storages(graph, {n: given.get(n.name, ()) for n in _placeholders(graph)}, TEMPORARIES)
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


def _placeholders(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "placeholder"]


def _results(graph: fx.Graph) -> list[fx.Node | None]:
    output = next(iter(reversed(graph.nodes)))
    return [n if isinstance(n, fx.Node) else None for n in output.args[0]]  # type: ignore[union-attr]


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
