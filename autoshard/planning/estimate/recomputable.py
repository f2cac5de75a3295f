"""The values of a planned graph that a rank may keep for the backward, or compute again there."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from autoshard.planning import cost
from autoshard.planning.cost import Cluster, tensor_bytes
from autoshard.planning.decisions import Decisions, ValueKey
from autoshard.planning.estimate.memory import Saving
from autoshard.planning.estimate.operator_time import OperatorTimes
from autoshard.planning.estimate.weights import Training
from autoshard.planning.operators import ATTENTION, LOSSES, packet
from autoshard.planning.strategy import Strategy, operands, results, value
from autoshard.planning.values import differentiable
from autoshard.runtime.collectives import P, State, forward_value
from autoshard.runtime.compat import draws

LEAST_PRICE = 1e-16
"""Seconds a byte, of those in the last segment: there only what takes no time is computed again."""

_AGAIN = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


@dataclass(frozen=True, kw_only=True)
class RankValue:
    """One value on a rank: what an operator makes, or what a change of state makes of that.

    key: the node and the placement. nbytes: of the value. inner: bytes that the operator keeps of
    its own besides, unless it runs again. seconds: to compute it, its operands being there.
    sources: positions of the values it is computed from. needed: a derivative reads it.
    once: it cannot be computed again (a draw of random numbers). again: the user's region of
    activation checkpointing in which it is computed again; -1 outside. held: whether it is in
    memory while it is there, and not inside of a fused kernel. views: other names of its memory,
    which share its fate. transfer: seconds to send it to the host, or to fetch it from there;
    infinite where it stays on the device.
    """

    key: ValueKey
    nbytes: int
    inner: int = 0
    seconds: float
    sources: tuple[int, ...]
    needed: bool = False
    once: bool = False
    again: int = -1
    held: bool = True
    views: tuple[ValueKey, ...] = ()
    transfer: float = math.inf


class Walk:
    """The values of one planned graph on a rank of an axis of `n`; stored parameters and inputs are
    none: they are there anyway. decisions: read anew for each operator."""

    def __init__(
        self,
        gm: fx.GraphModule,
        decisions: Decisions,
        n: int,
        cluster: Cluster,
        training: Training,
    ) -> None:
        self.gm, self.decisions, self.n = gm, decisions, n
        self.saving = Saving(gm, decisions, n, training)
        parts, losses = decisions.prices.parts, decisions.losses
        kernels = self.saving.kernels
        self.times = OperatorTimes(gm, n, cluster, training, parts, losses, kernels)
        self.cluster, self.link = cluster, cluster.real(decisions.prices.link)
        self.found: list[RankValue] = []
        self.place: dict[ValueKey, int] = {}
        self.needed: set[ValueKey] = set()
        self.views: dict[ValueKey, list[ValueKey]] = {}

    def run(self) -> list[RankValue]:
        """All, in the order of the forward."""
        return self.of(self.gm.graph.nodes)

    def of(self, nodes: Iterable[fx.Node]) -> list[RankValue]:
        """The values of some of the operators, in the order of the graph, whose derivatives are all
        that reads them; what other operators make is there."""
        self.found, self.place, self.needed, self.views = [], {}, set(), {}
        for node in nodes:
            strategy = self.decisions.strategies.get(node)
            if node.op != "call_function":
                continue
            if self.saving.kernels.is_view(node):
                self._view(node)
            elif strategy is not None and makes_tensors(node):
                self._operator(node, strategy)
        return [
            replace(one, needed=one.key in self.needed, views=tuple(self.views.get(one.key, ())))
            for one in self.found
        ]

    def _view(self, node: fx.Node) -> None:
        base = self.saving.kernels.base[node]
        if base in self.decisions.strategies and makes_tensors(node):
            own = (base, forward_value(self.decisions.state(base)))
            self.views.setdefault(own, []).append((node, forward_value(self.decisions.state(node))))

    def _operator(self, node: fx.Node, strategy: Strategy) -> None:
        read = [
            self._read(tensor, want, node)
            for tensor, want in zip(operands(node), strategy.inputs, strict=True)
        ]
        sources = tuple(dict.fromkeys(place for place in read if place is not None))
        for tensor, want in self.needs(node):
            self._need(tensor, want)
        state = self.decisions.state(node)
        self._add(
            node,
            key=(node, forward_value(state)),
            nbytes=self.saving.nbytes(node, state),
            inner=self.inner(node, strategy),
            seconds=self.seconds(node, strategy),
            sources=sources,
            once=self.is_made_once(node),
            held=self.saving.in_memory(node),
        )

    def needs(self, node: fx.Node) -> list[tuple[fx.Node, State]]:
        """The (value, state it is used in) that the derivative of `node` reads."""
        if not differentiable(node) or self._keeps_scores(node, self.decisions.strategies[node]):
            return []
        return self.saving.needs(node)

    def inner(self, node: fx.Node, strategy: Strategy) -> int:
        """Bytes that an operator keeps of its own, beside its result."""
        inner = self.saving.inner(node)
        if node in self.saving.chunked.gradients:
            inner += self.saving.chunked.gradients[node].kept
        elif differentiable(node):
            if packet(node) in ATTENTION:
                inner += self.saving.rows(node)
            if self._keeps_scores(node, strategy):
                inner += self.saving.nbytes(operands(node)[0], strategy.inputs[0])
        return inner

    def is_made_once(self, node: fx.Node) -> bool:
        """Whether a value cannot be computed again, or is not: what a loss by chunks makes."""
        return node in self.saving.chunked.gradients or is_made_once(node)

    def seconds(self, node: fx.Node, strategy: Strategy) -> float:
        """Seconds of an operator in forward, its own collectives among them."""
        seconds = self.times.seconds(node, strategy)
        for one in strategy.traffic:
            if not one.backward:
                link = self.cluster.real(self.decisions.prices.link_of(one.axis))
                seconds += cost.collective_seconds(one.op, one.nbytes, one.n or self.n, link)
        return seconds

    def change_seconds(self, tensor: fx.Node, have: State, want: State) -> float:
        """Seconds of a change of state in forward."""
        outer = cost.outer_dim(value(tensor).shape)
        whole = tensor_bytes(value(tensor))
        return cost.change_seconds(have, want, whole, self.n, self.link, False, outer)

    def _keeps_scores(self, node: fx.Node, strategy: Strategy) -> bool:
        """Whether an operator is a loss that keeps logarithms of probabilities."""
        return packet(node) in LOSSES and strategy.impl is None

    def _need(self, tensor: fx.Node, want: State) -> None:
        if self.saving.moved(tensor, want):
            self.needed.add((tensor, forward_value(want)))
        else:
            base = self.saving.kernels.base[tensor]
            if base.op == "call_function" and base in self.decisions.strategies:
                self.needed.add((base, forward_value(self.decisions.state(base))))

    def _read(self, tensor: fx.Node, want: State, user: fx.Node) -> int | None:
        """The position of what an operator reads, its changes of state added; None: an input."""
        base, at = self.saving.kernels.base[tensor], None
        if base.op == "call_function" and base in self.decisions.strategies:
            at = self.place.get((base, forward_value(self.decisions.state(base))))
        if self.n == 1:
            return at
        have = self.decisions.state(tensor)
        for state in self.decisions.route(tensor, want):
            if forward_value(state) != forward_value(have):
                key = (tensor, forward_value(state))
                if key not in self.place:
                    self._change(key, tensor, have, state, at, user)
                at = self.place[key]
                if self.decisions.gathers_again(tensor, have, state):
                    at = None  # the gather of a weight happens again whatever is kept
            have = state
        return at

    def _change(
        self,
        key: ValueKey,
        tensor: fx.Node,
        have: State,
        want: State,
        at: int | None,
        user: fx.Node,
    ) -> None:
        again = self.decisions.gathers_again(tensor, have, want)
        self._add(
            tensor if have == P else user,
            key=key,
            nbytes=0 if again else self.saving.nbytes(tensor, want),
            seconds=self.change_seconds(tensor, have, want),
            sources=() if at is None else (at,),
        )

    def _add(self, like: fx.Node, *, key: ValueKey, nbytes: int, **more: Any) -> None:
        again = like.meta.get("ac_graph_id", -1) if like.meta.get("recompute") in _AGAIN else -1
        single = nbytes and isinstance(value(key[0]), torch.Tensor)
        transfer = self.cluster.host_seconds(nbytes) if single else math.inf
        self.place[key] = len(self.found)
        self.found.append(RankValue(key=key, nbytes=nbytes, again=again, transfer=transfer, **more))


def takes_no_time(seconds: float, nbytes: int) -> bool:
    """Whether a value is computed again even where that gains nothing but its bytes of a moment."""
    return seconds <= LEAST_PRICE * nbytes


def makes_tensors(node: fx.Node) -> bool:
    return any(isinstance(one, torch.Tensor) for one in results(node))


def is_made_once(node: fx.Node) -> bool:
    """Whether a value cannot be computed again: it is computed from nothing, or drawn."""
    return not operands(node) or draws(node)
