"""What it costs to run a part of a graph on two halves, and what it spares.

Both ways are laid out in time (timeline.py), forward and backward: whole, where only the products
of weights' gradients run beside the sums of the gradients of what they read
(passes/delay_weight_products.py), and on halves. The products of a half read all of a weight and
half of the rows, at the rate that the machine has for so few; each kernel more costs a start, and
the two gradients of a weight are added up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx

from autoshard.planning import cost
from autoshard.planning.cost import COLLECTIVES, Cluster, Link
from autoshard.planning.halves.region import HALVES, Halves, communicates
from autoshard.planning.halves.timeline import Scheduled, interleave
from autoshard.planning.operators import (
    ADDED_PRODUCTS,
    ATTENTION,
    CONVOLUTIONS,
    PRODUCTS,
    is_view,
    packet,
)
from autoshard.planning.strategy import operands, value
from autoshard.planning.values import tensor_bytes
from autoshard.runtime.collectives import Axis, change_steps, shard_dim
from autoshard.runtime.graph_meta import DIFF

KERNEL_SECONDS = 3e-6
"""Of a product, an attention or a collective more, besides its work: the gap between two kernels of
a stream, and a kernel's first and last wave. No figure of a data sheet, and not measured here."""


class Seconds(NamedTuple):
    """Of a part of a step, forward and backward: whole, and on halves. sent: of the collectives."""

    whole: float
    halves: float
    sent: float

    def text(self) -> str:
        """The two, in microseconds."""
        return f"{1e6 * self.halves:.0f} us on halves, {1e6 * self.whole:.0f} us whole"


class Found(NamedTuple):
    """What became of a graph. collectives: how many changes of state run on halves; 0: it stays
    whole. seconds: of the part that could, whole and on halves; None: there is none. reason: why
    the graph, or the rest of it, stays whole."""

    collectives: int
    seconds: Seconds | None
    reason: str

    @property
    def spared(self) -> float:
        """Predicted seconds of a step that halves spare; negative where they only cost some."""
        if not self.collectives or self.seconds is None:
            return 0.0
        return self.seconds.whole - self.seconds.halves


@dataclass(frozen=True)
class Halving:
    """Whether a part runs on halves: where that is predicted to be quicker, or `always`."""

    always: bool = False

    def loses(self, seconds: Seconds) -> str:
        """Why a part stays whole; "" where it does not."""
        if self.always or seconds.halves < seconds.whole:
            return ""
        return f"its collectives and products would take {seconds.text()}"


def halving_for(option: bool | str) -> Halving | None:
    """What the option `overlap_halves` means; None: nothing runs on halves."""
    return Halving(option is True) if option else None


def halves_seconds(halves: Halves, axis: Axis, cluster: Cluster, link: Link) -> Seconds:
    """Predicted seconds of the part. link: of the axis, at the rate that programs get of it."""
    price = _Prices(halves, axis, cluster, link)
    whole, half = price.passes(1), price.passes(HALVES)
    share = cluster.efficiency.overlap
    before = sum(_took(jobs, share) for jobs in whole)
    after = sum(_took(_both(jobs), share) for jobs in half)
    return Seconds(before, after + price.more(), sum(job.sends for jobs in whole for job in jobs))


def _took(jobs: list[Scheduled], overlap: float) -> float:
    """Seconds until all is done. overlap: of what is hidden, the part that costs nothing."""
    seconds = interleave(jobs).seconds
    hidden = sum(job.seconds + job.sends for job in jobs) - seconds
    return seconds + (1 - overlap) * hidden


def _both(jobs: list[Scheduled]) -> list[Scheduled]:
    """The jobs of one half, and the same of the other."""
    later = [
        job._replace(half=1, awaits=None if job.awaits is None else job.awaits + len(jobs))
        for job in jobs
    ]
    return [*jobs, *later]


class _Prices:
    def __init__(self, halves: Halves, axis: Axis, cluster: Cluster, link: Link) -> None:
        self.halves, self.axis, self.cluster, self.link = halves, axis, cluster, link

    def passes(self, parts: int) -> tuple[list[Scheduled], list[Scheduled]]:
        """The jobs of one of so many parts, forward and backward."""
        forward: list[Scheduled] = []
        backward: list[Scheduled] = []
        nodes = list(self.halves.strategies)
        for node in nodes:
            self._add(forward, node, self._seconds(node, parts), parts, False)
        delayed: dict[fx.Node, float] = {}  # by the change that such products wait beside
        for node in reversed(nodes):
            if not node.meta.get(DIFF):
                continue
            took = self._seconds(node, parts)
            kind = packet(node)
            if kind in PRODUCTS and (change := self._read_change(node)) is not None:
                delayed[change] = delayed.get(change, 0.0) + took
            elif kind in PRODUCTS:
                took *= 2
            elif kind in ATTENTION:
                took *= 2.5
            self._add(backward, node, took, parts, True, delayed)
        return forward, backward

    def _add(
        self,
        jobs: list[Scheduled],
        node: fx.Node,
        seconds: float,
        parts: int,
        backward: bool,
        beside: Mapping[fx.Node, float] = {},  # noqa: B006 (read only)
    ) -> None:
        if communicates(node, backward):
            jobs.append(Scheduled(0, sends=self._sends(node, parts, backward)))
            start = len(jobs) - 1
            if node in beside:
                jobs.append(Scheduled(0, seconds=beside[node]))
            jobs.append(Scheduled(0, awaits=start))
        elif seconds:
            jobs.append(Scheduled(0, seconds=seconds))

    def _read_change(self, product: fx.Node) -> fx.Node | None:
        """The change, whose gradient is sent, that a product reads the result of."""
        for node in operands(product):
            while is_view(node) and len(node.all_input_nodes) == 1:
                node = node.all_input_nodes[0]
            if node in self.halves.strategies and communicates(node, True):
                return node
        return None

    def _sends(self, node: fx.Node, parts: int, backward: bool) -> float:
        _, src, dst, *_ = node.args
        kind: Any = change_steps(src, dst)[backward]  # type: ignore[arg-type]
        assert kind in COLLECTIVES
        sizes = [tensor_bytes(value(one)) for one in (operands(node)[0], node)]
        nbytes = (min if kind == "all_to_all" else max)(sizes) / parts
        return cost.collective_seconds(kind, nbytes, self.axis.size, self.link)

    def _seconds(self, node: fx.Node, parts: int) -> float:
        """Seconds of a product or of attention, on the rows of one part; of others, of what they
        read and write that no product does not, nothing."""
        flops = cost.node_flops(node)
        if not flops:
            return 0.0
        share = self.cluster.efficiency
        moved = sum(self._part(one, node, parts) for one in operands(node))
        moved += tensor_bytes(value(node)) / parts if _tensor(node) else 0.0
        work = flops / parts / share.compute
        if packet(node) in ATTENTION:
            work /= share.attention
        elif share.narrow:
            work *= 1 + share.narrow / _narrowest(node, parts)
        dtype = value(operands(node)[0]).dtype
        return cost.node_seconds(work, moved / share.memory, dtype, self.cluster.device)

    def _part(self, operand: fx.Node, node: fx.Node, parts: int) -> float:
        strategy = self.halves.strategies[node]
        assert strategy is not None
        wants = dict(zip(operands(node), strategy.inputs))
        cut = shard_dim(wants[operand]) is not None
        return tensor_bytes(value(operand)) / (parts if cut else 1)

    def more(self) -> float:
        """Seconds of the kernels that halves add, and of the sums of the gradients of weights."""
        kernels = moved = 0
        for node in self.halves.strategies:
            trained = bool(node.meta.get(DIFF))
            kernels += communicates(node, False) + communicates(node, True)
            if cost.node_flops(node):
                kernels += 1 + 2 * trained
                whole = [one for one in operands(node) if not self._is_cut(one, node)]
                moved += sum(3 * tensor_bytes(value(one)) for one in whole if one.meta.get(DIFF))
        device = self.cluster.device.memory_bandwidth * self.cluster.efficiency.memory
        return kernels * KERNEL_SECONDS + moved / device

    def _is_cut(self, operand: fx.Node, node: fx.Node) -> bool:
        return self._part(operand, node, HALVES) < tensor_bytes(value(operand))


def _tensor(node: fx.Node) -> bool:
    return isinstance(value(node), torch.Tensor)


def _narrowest(node: fx.Node, parts: int) -> float:
    """The smallest extent of a product on the rows of one part."""
    kind, made = packet(node), value(node)
    if kind not in PRODUCTS - CONVOLUTIONS or made.dim() < 2:
        return float("inf")
    left = value(operands(node)[kind in ADDED_PRODUCTS])
    columns, inner = cost.hint(made.shape[-1]), cost.hint(left.shape[-1])
    return max(1.0, min(cost.numel(made) / columns / parts, columns, inner))
