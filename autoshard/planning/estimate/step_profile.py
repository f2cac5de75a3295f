"""What one planned graph does on one rank of its tp axis: arithmetic, communication, memory.

Made once for each size of the tp axis. The data-parallel axes change none of it, because the batch
of a data-parallel rank is its own: they add gathers and reductions of parameters, which
`estimate/mesh.py` lays over this profile for every way to split the rest of the world.

Operators take roofline time on the shapes of one rank (planning/cost.py), at the rates the cluster
gets of its data sheet. The backward of a product costs one product for each operand that has a
gradient; that of attention, which computes its scores again, 2.5 times its forward (T. Dao,
"FlashAttention-2", 2023, section 3.3); of anything else, twice its memory traffic.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import fx

from autoshard.planning import cost
from autoshard.planning.cost import Cluster, Link
from autoshard.planning.estimate.activations import SavedForBackward, saved_for_backward
from autoshard.planning.fusion import Kernels, joined
from autoshard.planning.operators import ATTENTION, packet
from autoshard.planning.planner import Decisions
from autoshard.planning.strategy import Strategy, operands, value
from autoshard.planning.values import (
    differentiable,
    global_bytes,
    is_lookup,
    producer,
    tensor_bytes,
)
from autoshard.runtime.collectives import State, chunk_size, forward_value, shard_dim
from autoshard.runtime.graph_meta import BUFFER, REDUCED_DTYPE, STORED_DTYPE

"""Keys in the meta of a parameter that is computed with in another dtype than it is stored in."""


class Sent(NamedTuple):
    """One collective on the tp axis; `nbytes` is its logical size (planning/cost.py)."""

    op: str
    nbytes: int
    backward: bool


@dataclass(frozen=True, kw_only=True)
class Weight:
    """A parameter as the tp axis leaves it: local shape, and where it is first used (None: never).

    itemsize: bytes an element while it is computed with. again: whether backward reads it. stored:
    bytes an element as it is kept, where that is in another dtype (the option `precision`).
    reduced: those of its gradient while it travels, where that is told.
    """

    name: str
    shape: tuple[int, ...]
    itemsize: int
    trained: bool
    use: int | None
    again: bool
    stored: int | None = None
    reduced: int | None = None

    @property
    def kept(self) -> int:
        """Bytes an element as it is kept, by the optimizer too."""
        return self.itemsize if self.stored is None else self.stored

    @property
    def numel(self) -> int:
        """Elements on a rank of the tp axis."""
        return math.prod(self.shape)

    def part(self, ranks: int) -> int:
        """Elements that the first of `ranks` data-parallel ranks stores: rows, by torch.chunk."""
        if not self.shape or ranks == 1:
            return self.numel
        return chunk_size(self.shape[0], ranks) * math.prod(self.shape[1:])


@dataclass(frozen=True, kw_only=True)
class Profile:
    """One rank of a tp axis of `n`, whatever the data-parallel axes.

    forward, backward: seconds at each operator, tp collectives included, which the compute waits
    for. compute: the part of their sum that is not communication. flops: operations of the serial
    model, forward and backward, by which utilisation is counted (PaLM's MFU: no recomputation).
    """

    n: int
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    compute: float
    flops: float
    peak: float
    sent: tuple[Sent, ...]
    seconds_sent: float
    weights: tuple[Weight, ...]
    activations: SavedForBackward
    buffers: int


def profile(
    gm: fx.GraphModule,
    decisions: Decisions,
    parameters: Mapping[fx.Node, str],
    n: int,
    cluster: Cluster,
    link: Link,
) -> Profile:
    """The profile of `gm` under `decisions` on an axis of `n` ranks joined by `link`."""
    return _Profiler(gm, decisions, parameters, n, cluster, cluster.real(link)).run()


def tp_traffic(gm: fx.GraphModule, decisions: Decisions, n: int) -> list[tuple[int, Sent]]:
    """The collectives of a plan: (position of the operator that causes it, collective).

    A value is changed once for each state it is used in, as `localize` rewrites it. Reductions of
    the gradients of parameters, which a pass merges, stand at the parameter's own position.
    """
    found: list[tuple[int, Sent]] = []
    done: set[tuple[fx.Node, State]] = set()
    place = {node: i for i, node in enumerate(gm.graph.nodes)}

    def read(source: fx.Node, want: State, user: fx.Node) -> None:
        have = decisions.state(source)
        if (source, want) in done:
            return
        for state in decisions.route(source, want):
            if (source, state) not in done:
                done.add((source, state))
                at = place[source] if source in decisions.stored else place[user]
                found.extend((at, one) for one in _change(source, have, state, n))
            have = state

    for node, strategy in decisions.strategies.items():
        for source, want in zip(operands(node), strategy.inputs):
            read(source, want, node)
        for t in strategy.traffic:
            if differentiable(node) or not t.backward:
                found.append((place[node], Sent(t.op, t.nbytes, t.backward)))
    output = next(iter(reversed(gm.graph.nodes)))
    for result, state in zip(output.args[0], decisions.outputs):  # type: ignore[arg-type]
        if isinstance(result, fx.Node) and isinstance(value(result), torch.Tensor):
            read(result, state, output)
    return found


def _change(source: fx.Node, have: State, want: State, n: int) -> list[Sent]:
    if n == 1 or have == want:
        return []
    if not differentiable(source) and forward_value(have) == forward_value(want):
        return []
    whole = global_bytes(source)
    forward, backward = cost.change_collectives(have, want)
    passes = [(op, False) for op in forward]
    passes += [(op, True) for op in backward if differentiable(source)]
    return [Sent(op, whole // n if op == "all_to_all" else whole, late) for op, late in passes]


class _Profiler:
    def __init__(
        self,
        gm: fx.GraphModule,
        decisions: Decisions,
        parameters: Mapping[fx.Node, str],
        n: int,
        cluster: Cluster,
        link: Link,
    ) -> None:
        self.gm, self.decisions, self.parameters = gm, decisions, parameters
        self.n, self.cluster, self.link = n, cluster, link
        self.kernels = Kernels(gm)

    def run(self) -> Profile:
        nodes = list(self.gm.graph.nodes)
        forward, backward = [0.0] * len(nodes), [0.0] * len(nodes)
        flops = 0.0
        by_dtype: dict[torch.dtype, float] = {}
        for i, node in enumerate(nodes):
            strategy = self.decisions.strategies.get(node)
            if node.op != "call_function" or strategy is None or self.kernels.is_view(node):
                continue
            forward[i] = self._seconds(node, strategy)
            backward[i] = forward[i] * _backward(node)
            own = cost.node_flops(node) * (1 + min(2.0, _backward(node)))
            flops += own
            by_dtype[_dtype(node)] = by_dtype.get(_dtype(node), 0.0) + own
        compute = sum(forward) + sum(backward)
        sent, seconds = self._communicate(forward, backward)
        activations = saved_for_backward(self.gm, self.decisions, self.n)
        main = max(by_dtype, key=lambda d: by_dtype[d], default=torch.float32)
        place = {node: i for i, node in enumerate(nodes)}
        return Profile(
            n=self.n,
            forward=tuple(forward),
            backward=tuple(backward),
            compute=compute,
            flops=flops,
            peak=self.cluster.device.peak(main),
            sent=tuple(sent),
            seconds_sent=seconds,
            weights=self._weights(place, activations.weights),
            activations=activations,
            buffers=sum(tensor_bytes(value(node)) for node in nodes if node.meta.get(BUFFER)),
        )

    def _communicate(self, forward: list[float], backward: list[float]) -> tuple[list[Sent], float]:
        """Add each collective's time where it is waited for; gradients of weights go as one."""
        parameters = set(self.decisions.stored)
        nodes = list(self.gm.graph.nodes)
        sent, seconds = [], 0.0
        merged: dict[str, int] = {}
        for at, one in tp_traffic(self.gm, self.decisions, self.n):
            sent.append(one)
            if one.backward and nodes[at] in parameters:
                merged[one.op] = merged.get(one.op, 0) + one.nbytes
                continue
            took = cost.collective_seconds(one.op, one.nbytes, self.n, self.link)
            (backward if one.backward else forward)[at] += took
            seconds += took
        for op, nbytes in merged.items():
            took = cost.collective_seconds(op, nbytes, self.n, self.link)
            backward[0] += took
            seconds += took
        return sent, seconds

    def _seconds(self, node: fx.Node, strategy: Strategy) -> float:
        """Roofline seconds of the forward on a rank's shapes."""
        states = [strategy.output] if isinstance(strategy.output, str) else list(strategy.output)
        sharded = any(shard_dim(state) is not None for state in (*strategy.inputs, *states))
        made = value(node)
        results = made if isinstance(made, (tuple, list)) else [made]
        written = sum(tensor_bytes(one) / self._split(state) for one, state in zip(results, states))
        moved = written if self.kernels.writes(node) else 0.0
        seen: set[fx.Node] = set()
        for tensor, want in zip(operands(node), strategy.inputs):
            base = self.kernels.base[tensor]
            if base in seen or joined(base, node, self.kernels.stage):
                continue
            seen.add(base)
            size = tensor_bytes(value(tensor)) / self._split(want)
            moved += min(size, written) if is_lookup(node) else size
        share = self.cluster.efficiency
        flops = cost.node_flops(node) / (self.n if sharded else 1) / share.compute
        return cost.node_seconds(flops, moved / share.memory, _dtype(node), self.cluster.device)

    def _weights(
        self, place: Mapping[fx.Node, int], again: frozenset[fx.Node]
    ) -> tuple[Weight, ...]:
        found = []
        for node, name in self.parameters.items():
            val = value(node)
            shape = [cost.hint(extent) for extent in val.shape]
            dim = shard_dim(self.decisions.stored[node])
            if dim is not None:
                shape[dim] = chunk_size(shape[dim], self.n)
            use = min((place[user] for user in node.users), default=None)
            trained = bool(val.requires_grad)
            found.append(
                Weight(
                    name=name,
                    shape=tuple(shape),
                    itemsize=val.element_size(),
                    trained=trained,
                    use=use,
                    again=node in again,
                    stored=_size(node.meta.get(STORED_DTYPE)),
                    reduced=_size(node.meta.get(REDUCED_DTYPE)),
                )
            )
        return tuple(found)

    def _split(self, state: State) -> int:
        return 1 if shard_dim(state) is None else self.n


def _size(dtype: torch.dtype | None) -> int | None:
    return None if dtype is None else dtype.itemsize


def _backward(node: fx.Node) -> float:
    """The time of the backward in units of the forward's."""
    if not differentiable(node):
        return 0.0
    if packet(node) in ATTENTION:
        return 2.5
    if cost.node_flops(node):
        return float(sum(differentiable(t) for t in operands(node)[:2]))
    return 2.0


def _dtype(node: fx.Node) -> torch.dtype:
    """What the operator computes in: the dtype of its first operand, or of its result."""
    for tensor in operands(node):
        if value(tensor).is_floating_point():
            dtype: torch.dtype = value(tensor).dtype
            return dtype
    made = value(producer(node)[0])
    first = made[0] if isinstance(made, (tuple, list)) and made else made
    return first.dtype if isinstance(first, torch.Tensor) else torch.float32
