"""What the collectives of one weight take on the data-parallel axes, before its bucket is known.

They are those of traffic.py for a bucket of this weight alone, but that a bucket's latency is
shared by its members by their bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from autoshard.planning.cost import Link, collective_seconds
from autoshard.planning.estimate.traffic import Sent, seconds
from autoshard.planning.estimate.weights import Layout, Weight, kept_and_reduced, local_shape
from autoshard.planning.strategy import value
from autoshard.runtime.collectives import State
from autoshard.runtime.graph_meta import DIFF


@dataclass(frozen=True, kw_only=True)
class DataAxes:
    """The data-parallel axes beside a planned axis of `n` ranks.

    ranks, links: of all axes, by name. second: seconds of a step that a second of their collectives
    is charged; less than one where compute hides them. bucket: bytes of one.
    """

    n: int
    layout: Layout
    ranks: Mapping[str, int]
    links: Mapping[str, Link]
    second: float
    bucket: int

    def took(self, sent: Sent) -> float:
        """Seconds of a collective without the share of its latency that other weights pay."""
        latency = collective_seconds(sent.op, 0, self.ranks[sent.axis], self.links[sent.axis])
        others = latency * (1 - min(1.0, sent.nbytes / self.bucket))
        return seconds(sent, self.ranks, self.links) - others

    def weight(self, node: fx.Node, state: State, again: bool, experts: int = 0) -> Weight:
        """A parameter in a state on the planned axis. again, experts: as in `Weight`."""
        kept, reduced = kept_and_reduced(node)
        return Weight(
            name=node.name,
            shape=local_shape(node, state, self.n),
            itemsize=value(node).element_size(),
            trained=bool(node.meta.get(DIFF)),
            use=0,
            again=again,
            stored=kept,
            reduced=reduced,
            experts=experts,
        )
