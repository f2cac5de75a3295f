"""`Program.memory()`: the bytes one rank holds through a training step, predicted from its graphs.

A step is the forward graph, the backward graph and the optimizer's update, in the steady state:
gradients are None when it starts, optimizer state exists. Counted are tensors, as torch allocates
them; not the caller's batch, and not the scratch space inside an operator.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from autoshard.memory.inductor_liveness import Fused
from autoshard.memory.liveness import Change, Held, Kernel, Storage, kernels, storages, walk
from autoshard.memory.reused_memory import reused_memory
from autoshard.passes import GATHERS, PASS, BucketGradients, BucketParameters
from autoshard.planning import tensor_bytes
from autoshard.runtime.compat import ForwardBackward, Lowered

PARAMETERS, GRADIENTS, OPTIMIZER = "parameters", "gradients", "optimizer"
BUFFERS, ACTIVATIONS, GATHERED = "buffers", "activations", "gathered"
TEMPORARIES, OUTPUTS, PENDING = "temporaries", "outputs", "pending"
KINDS = (
    PARAMETERS, GRADIENTS, OPTIMIZER, BUFFERS, ACTIVATIONS, GATHERED, TEMPORARIES, OUTPUTS, PENDING
)  # fmt: skip

_BUCKETS = (BucketParameters.name, BucketGradients.name)


@dataclass(frozen=True)
class Optimizer:
    """What an optimizer of torch.optim allocates.

    states: tensors of the parameter's size and dtype that it keeps for each. counter: bytes of the
    step counter it keeps beside. scratch: bytes of its update at most, from the sizes of the
    trained shards in order.
    """

    states: int
    counter: int
    scratch: Callable[[Sequence[int]], int]


def _one_by_one(sizes: Sequence[int]) -> int:
    """Root and quotient of one parameter, while the denominator of the one before is there."""
    return max((2 * size + last for last, size in zip([0, *sizes], sizes)), default=0)


def _nothing(sizes: Sequence[int]) -> int:
    return 0


#: "adamw" is what torch.optim.AdamW does with DTensors unless `foreach` or `fused` is asked for.
OPTIMIZERS = {
    "adamw": Optimizer(2, 4, _one_by_one),
    "adamw_foreach": Optimizer(2, 4, sum),
    "adamw_fused": Optimizer(2, 4, _nothing),
    "momentum": Optimizer(1, 0, _nothing),
    "sgd": Optimizer(0, 0, _nothing),
}


@dataclass(frozen=True)
class Moment:
    """What is alive while one operator runs: bytes by kind. phase: "forward", "backward" or
    "optimizer"; node: the operator's name in the phase's graph."""

    phase: str
    node: str
    held: Mapping[str, int]

    @property
    def bytes(self) -> int:
        """All kinds together."""
        return sum(self.held.values())


@dataclass(frozen=True)
class Memory:
    """Bytes one rank holds.

    parameters, gradients, buffers, optimizer: what stays between steps, exactly; the optimizer's
    state as `Program.memory` was asked for. activations: what the forward keeps for the backward.
    gathered, temporaries, outputs: the most of each at any one time, of weights gathered from
    other ranks and buckets of gradients, of values that come and go, and of results. pending:
    gradients that wait to be reduced, in a program of `no_sync`. peak: the most of all kinds
    together, at `peak_at`.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    buffers: int
    gathered: int
    temporaries: int
    outputs: int
    pending: int
    peak: int
    peak_at: Moment

    @property
    def total(self) -> int:
        """What is held from one operator to another: all but what is gathered, and temporaries."""
        stored = self.parameters + self.gradients + self.optimizer + self.buffers
        return stored + self.activations + self.pending


def summary(step: Step) -> Memory:
    """The figures of a step."""
    most = dict.fromkeys(KINDS, 0)
    peak: Moment | None = None
    for moment in step.moments():
        for kind, nbytes in moment.held.items():
            most[kind] = max(most[kind], nbytes)
        if peak is None or moment.bytes > peak.bytes:
            peak = moment
    assert peak is not None
    most.update({GRADIENTS: step.gradients, ACTIVATIONS: step.activations})
    return Memory(**most, peak=peak.bytes, peak_at=peak)


class Step:
    """The forward, the backward and the update of one program, as moments in order.

    graphs: `ForwardBackward`, run operator by operator, or `Lowered`, as
    Inductor runs them. parameters: positions of the parameters among the inputs. resident: bytes
    by kind of what is there whatever runs: parameters, buffers, optimizer state. gradients: bytes
    of all gradients. scratch: what the optimizer's update allocates at most.
    """

    def __init__(
        self,
        graphs: ForwardBackward | Lowered,
        parameters: Container[int],
        resident: Mapping[str, int],
        gradients: int,
        scratch: int,
    ) -> None:
        self.graphs, self.resident = graphs, resident
        self.gradients, self.scratch = gradients, scratch
        forward = graphs.forward.graph
        inputs = [node.name for node in forward.nodes if node.op == "placeholder"]
        self.weights = {name for i, name in enumerate(inputs) if i in parameters}
        self.held, self.kernels = self._stored(forward, {})
        results = _results(forward)
        names: Sequence[str] = [n.name if n else "" for n in results]
        if isinstance(graphs, Lowered):
            names = graphs.names
        backward = () if graphs.backward is None else graphs.backward.graph.nodes
        wanted = {node.name for node in backward if node.op == "placeholder"}
        self.known = {node.name: node for node in forward.nodes if node.op == "placeholder"}
        self.known |= {name: node for name, node in zip(names, results) if node is not None}
        # what is saved comes after the results of the model
        returned = results[: len(results) - sum(name in wanted for name in self.known)]
        saved = [node for name, node in self.known.items() if name in wanted]
        _mark(self.held, [n for n in results if n is not None], OUTPUTS)
        _mark(self.held, saved, ACTIVATIONS)
        _mark(self.held, _gathered(forward, self.weights), GATHERED)
        self.saved = {storage for node in saved for storage in self.held[node]}
        self.returned = {s for node in returned if node is not None for s in self.held[node]}

    def _stored(self, graph: fx.Graph, given: Held) -> tuple[Held, list[Kernel]]:
        """Where the values of a graph are, and what runs."""
        if isinstance(self.graphs, Lowered):
            fused = Fused(graph, given, TEMPORARIES)
            return fused.held, fused.kernels
        held = storages(graph, given, TEMPORARIES)
        return held, kernels(graph, held)

    @property
    def activations(self) -> int:
        """Bytes kept from the forward for the backward, gathered weights aside."""
        return sum(s.nbytes for s in self.saved if s.kind == ACTIVATIONS)

    def moments(self) -> Iterator[Moment]:
        """Every operator of the step with what is alive while it runs."""
        alive = {**dict.fromkeys(KINDS, 0), **self.resident}
        yield Moment("forward", "", dict(alive))
        yield from _run("forward", walk(self.kernels, (), reused_memory(self.kernels)), alive)
        # of the results, the caller keeps the loss: a scalar
        alive[OUTPUTS] = alive[TEMPORARIES] = 0
        alive[ACTIVATIONS] = self.activations
        alive[GATHERED] = sum(s.nbytes for s in self.saved if s.kind == GATHERED)
        if self.graphs.backward is None:
            return
        yield from self._backward(self.graphs.backward.graph, alive)
        alive.update(dict.fromkeys((ACTIVATIONS, GATHERED), 0))
        alive[TEMPORARIES] = self.scratch
        yield Moment("optimizer", "", dict(alive))

    def _backward(self, graph: fx.Graph, alive: dict[str, int]) -> Iterator[Moment]:
        inputs = [n for n in graph.nodes if n.op == "placeholder"]
        tangents = {n: _tangent(n) for n in inputs if n.name not in self.known}
        alive[TEMPORARIES] = sum(s.nbytes for made in tangents.values() for s in made)
        given = {n: self.held[self.known[n.name]] for n in inputs if n not in tangents} | tangents
        held, run = self._stored(graph, given)
        _mark(held, _gathered(graph, self.weights), GATHERED)
        results = [n for n in _results(graph) if n is not None]
        kept_storages, copies = _handed_out(results, held)
        for storage in kept_storages:
            storage.kind = GRADIENTS
        # autograd lets a graph write over what was saved for it, not over what others may have
        foreign = self.returned.union(*tangents.values())
        gone = dict.fromkeys(s for n in inputs for s in held[n])
        changes = walk(run, gone, reused_memory(run, gone, foreign))
        yield from _run("backward", changes, alive)
        alive[GRADIENTS] += copies
        yield Moment("backward", "unwrap", dict(alive))


def _handed_out(gradients: list[fx.Node], held: Held) -> tuple[list[Storage], int]:
    """Storages that become gradients as they are, and the bytes of gradients that are copied.

    The rule of `runtime.storage.shared`: views of one storage stay where they are most of it.
    """
    used: dict[Storage, int] = {}
    for node in gradients:
        for storage in held[node]:
            used[storage] = used.get(storage, 0) + tensor_bytes(node.meta["val"])
    kept, copied = {}, 0
    for node in gradients:
        mostly = all(4 * used[s] >= 3 * s.nbytes for s in held[node])
        if mostly and node.meta["val"].is_contiguous():
            kept.update(dict.fromkeys(held[node]))
        else:
            copied += tensor_bytes(node.meta["val"])
    return list(kept), copied


def _tangent(node: fx.Node) -> tuple[Storage, ...]:
    """The gradient of a result. One that the loss does not depend on is made, of zeros."""
    return (Storage(tensor_bytes(node.meta["val"]), TEMPORARIES),)


def _run(phase: str, changes: Iterable[Change], alive: dict[str, int]) -> Iterator[Moment]:
    for node, taken, made, freed in changes:
        for storage in taken:
            alive[storage.kind] -= storage.nbytes
        for storage in made:
            alive[storage.kind] += storage.nbytes
        yield Moment(phase, node.name, dict(alive))
        for storage in freed:
            alive[storage.kind] -= storage.nbytes


def _results(graph: fx.Graph) -> list[fx.Node | None]:
    output = next(iter(reversed(graph.nodes)))
    return [n if isinstance(n, fx.Node) else None for n in output.args[0]]  # type: ignore[union-attr]


def _mark(held: Held, nodes: Iterable[fx.Node], kind: str) -> None:
    for node in nodes:
        for storage in held[node]:
            storage.kind = kind


def _gathered(graph: fx.Graph, weights: Container[str]) -> list[fx.Node]:
    """Weights made whole from what this rank and others store, and buckets of gradients.

    weights: names of the graph's inputs that are stored parameters.
    """
    found = []
    stored: set[fx.Node] = set()
    for node in graph.nodes:
        sources = node.all_input_nodes
        if (node.meta.get("custom") or {}).get(PASS) in _BUCKETS:
            found.append(node)
        elif node.op == "placeholder" and node.name in weights:
            stored.add(node)
        elif node.op == "call_function" and sources and all(n in stored for n in sources):
            # until it is gathered, a weight may be padded or cast
            if node.target in GATHERS:
                found.append(node)
            else:
                stored.add(node)
    return found
