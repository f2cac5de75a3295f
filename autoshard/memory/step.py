"""`Program.memory()`: the bytes one rank holds through a training step, predicted from its graphs.

A step is the forward graph, the backward graph and the optimizer's update, in the steady state:
gradients are None when it starts, optimizer state exists. Counted are tensors, as torch allocates
them; not the caller's batch, and not the scratch space inside an operator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from autoshard.compiling import Built
from autoshard.memory.phases import (
    ACTIVATIONS,
    BUFFERS,
    GATHERED,
    GRADIENTS,
    KINDS,
    OPTIMIZER,
    OUTPUTS,
    PARAMETERS,
    PENDING,
    TEMPORARIES,
    Change,
    Phases,
    phases,
)
from autoshard.planning import tensor_bytes
from autoshard.runtime.compat import ForwardBackward, InductorStep
from autoshard.runtime.graph_meta import BUFFER, PENDING_INPUTS


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
    "host": Optimizer(0, 0, _nothing),  # of any that `offload_optimizer` was given
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


@dataclass(frozen=True, kw_only=True)
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


@dataclass(frozen=True, kw_only=True)
class Step:
    """The forward, the backward and the update of one program.

    resident: bytes by kind of what is there whatever runs: parameters, buffers, optimizer state.
    gradients: bytes of all gradients. scratch: what the optimizer's update allocates at most.
    """

    phases: Phases
    resident: Mapping[str, int]
    gradients: int
    scratch: int

    @property
    def activations(self) -> int:
        """Bytes kept from the forward for the backward, gathered weights aside."""
        return self._saved(ACTIVATIONS)

    def moments(self) -> Iterator[Moment]:
        """Every operator of the step with what is alive while it runs."""
        alive = {**dict.fromkeys(KINDS, 0), **self.resident}
        yield Moment("forward", "", dict(alive))
        yield from _run("forward", self.phases.forward, alive)
        # of the results, the caller keeps the loss: a scalar
        alive[OUTPUTS] = 0
        alive[ACTIVATIONS] = self.activations
        alive[GATHERED] = self._saved(GATHERED)
        if self.phases.backward is None:
            return
        alive[TEMPORARIES] = self.phases.tangents
        yield from _run("backward", self.phases.backward, alive)
        alive[GRADIENTS] += self.phases.copied
        yield Moment("backward", "unwrap", dict(alive))
        alive.update(dict.fromkeys((ACTIVATIONS, GATHERED), 0))
        alive[TEMPORARIES] = self.scratch
        yield Moment("optimizer", "", dict(alive))

    def _saved(self, kind: str) -> int:
        return sum(storage.nbytes for storage in self.phases.saved if storage.kind == kind)


def _run(phase: str, changes: Iterable[Change], alive: dict[str, int]) -> Iterator[Moment]:
    for name, made, freed in changes:
        for storage in made:
            alive[storage.kind] += storage.nbytes
        yield Moment(phase, name, dict(alive))
        for storage in freed:
            alive[storage.kind] -= storage.nbytes


def step_of(
    built: Built,
    optimizer: str | None = None,
    inner: str | None = None,
    graphs: ForwardBackward | InductorStep | None = None,
) -> Step:
    """The step of a program under one of OPTIMIZERS; None: "adamw", or "host" where the option
    `optimizer_states` says so.

    inner: what runs the graphs; None: the program's own inner compiler. graphs: what runs in the
    place of its own.
    """
    if optimizer is None:
        optimizer = "host" if built.config.optimizer_states == "host" else "adamw"
    if optimizer not in OPTIMIZERS:
        raise ValueError(f"optimizer {optimizer!r} is none of {', '.join(OPTIMIZERS)}")
    kind = OPTIMIZERS[optimizer]
    parameters = buffers = 0
    trained, positions = [], set()
    placeholders = built.serial.graph.find_nodes(op="placeholder")
    for i, node in enumerate(placeholders):
        if not isinstance(node.meta.get("val"), torch.Tensor):
            continue
        if node in built.parameters:
            positions.add(i)
            local = tensor_bytes(built.stored_value(node))
            parameters += local
            trained += [local] if node.meta["val"].requires_grad else []
        elif node.meta.get(BUFFER):
            buffers += tensor_bytes(node.meta["val"])
    waiting = built.graph_module.meta.get(PENDING_INPUTS, ())
    resident = {
        PARAMETERS: parameters,
        BUFFERS: buffers,
        OPTIMIZER: kind.states * sum(trained) + kind.counter * len(trained),
        PENDING: sum(math.prod(each.shape) * each.dtype.itemsize for each in waiting),
    }
    if graphs is None and (inner or built.config.inner) == "inductor":
        graphs = built.inductor
    return Step(
        phases=phases(graphs or built.running, positions),
        resident=resident,
        gradients=sum(trained),
        scratch=kind.scratch(trained),
    )
