"""interleave_halves: while one half's collective is under way, the other half computes.

    before (a forward graph, tp=2)                  after
    %0 = mm(%a, %w)          of the first half      %0 = mm(%a, %w)
    %1 = mm(%b, %w)          of the second          %2 = all_reduce(%0, sum, tp)
    %2 = all_reduce(%0, sum, tp)                    %1 = mm(%b, %w)
    %3 = all_reduce(%1, sum, tp)                    %4 = wait(%2)
    %4 = wait(%2)                                   %3 = all_reduce(%1, sum, tp)
    %5 = wait(%3)                                   %6 = mm(%4, %v)
    %6 = mm(%4, %v)                                 %5 = wait(%3)
    %7 = mm(%5, %v)                                 %7 = mm(%5, %v)

Works on forward and backward alike, where `split_halves` has made halves of the graph before
autograd. A node is of a half that says so, or reads nothing of the other one; the order is that of
the list schedule in planning/halves/timeline.py, with the seconds of products and collectives on
the machine that the plan is for. `schedule_collectives` puts the waits where they are read.

Each half keeps the order that it has: what `delay_weight_products` put behind a collective stays
there. A graph is the same on all ranks of its axis, and so is the order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autoshard.passes.base import Context, Report
from autoshard.passes.bucketing import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, WAIT, c10d, start_of
from autoshard.planning import cost, tensor_bytes, value
from autoshard.planning.cost import Cluster, Link
from autoshard.planning.halves import Scheduled, interleave
from autoshard.runtime.collectives import Axis
from autoshard.runtime.graph_meta import HALF


@dataclass(frozen=True)
class InterleaveHalves:
    """cluster: what the seconds are of. link: that of the planned axis."""

    name: ClassVar[str] = "interleave_halves"
    optional: ClassVar[bool] = True
    cluster: Cluster
    link: Link

    def run(self, gm: fx.GraphModule, ctx: Context) -> Report:
        """Reorder in place."""
        report = Report(self.name)
        halves = half_of_each(gm.graph)
        if not any(half is not None for half in halves.values()):
            return report
        nodes = [node for node in gm.graph.nodes if node.op == "call_function"]
        number = {node: i for i, node in enumerate(nodes)}
        jobs = [self._job(node, halves[node], number, ctx.axis) for node in nodes]
        order = interleave(jobs).order
        # what is written may be read by any that stood before
        writes = [i for i in order if _writes(nodes[i])]
        for i in (*(i for i in order if not _writes(nodes[i])), *sorted(writes)):
            gm.graph.output_node().prepend(nodes[i])
        report.hits = sum(job.sends > 0 for job in jobs)
        return report

    def _job(
        self, node: fx.Node, half: int | None, number: Mapping[fx.Node, int], axis: Axis
    ) -> Scheduled:
        inputs = tuple(number[one] for one in node.all_input_nodes if one in number)
        awaits = number.get(start_of(node)) if node.target is WAIT else None
        sends = 0.0
        if half is not None and node.target in _KINDS and node.args[-1] == axis.group:
            sends = self._sends(node, axis.size)
        return Scheduled(half, self._seconds(node), sends, awaits, inputs)

    def _sends(self, node: fx.Node, n: int) -> float:
        values = [value(one) for one in (*node.all_input_nodes, node)]
        nbytes = max(map(tensor_bytes, values))
        return cost.collective_seconds(_KINDS[node.target], nbytes, n, self.link)

    def _seconds(self, node: fx.Node) -> float:
        """Seconds of a product or of attention; of what compilers fuse with others, none."""
        flops = cost.node_flops(node)
        if not flops:
            return 0.0
        share, made = self.cluster.efficiency, pytree.tree_leaves(value(node))[0]
        moved = cost.node_bytes(node) / share.memory
        return cost.node_seconds(flops / share.compute, moved, made.dtype, self.cluster.device)


def half_of_each(graph: fx.Graph) -> dict[fx.Node, int | None]:
    """The half that each node of a graph after autograd is of; None: of neither, or of both."""
    own = _said(graph)
    found: dict[fx.Node, int | None] = {}
    both: set[fx.Node] = set()  # and what is made of it: of the two gradients of a weight, the sum
    for node in graph.nodes:
        inputs = node.all_input_nodes
        halves = {half for half in (own[node], *map(found.get, inputs)) if half is not None}
        if len(halves) > 1 or any(one in both for one in inputs):
            both.add(node)
        found[node] = halves.pop() if len(halves) == 1 and node not in both else None
    return found


def _said(graph: fx.Graph) -> dict[fx.Node, int | None]:
    """The half that each node says to be of, but for those that autograd's graph has once for both.

    Halves meet in sums of gradients. Where, without one, a node of one half reads what says to be
    of the other, both have asked for it: the transpose of a weight, numbers of positions.
    """
    said = {node: (node.meta.get("custom") or {}).get(HALF) for node in graph.nodes}
    gradients: set[fx.Node] = set()
    for node in graph.nodes:
        given = node.op == "placeholder" and node.name.startswith("tangents")
        if given or any(one in gradients for one in node.all_input_nodes):
            gradients.add(node)
    shared: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        half = said[node]
        if half is None or node in gradients:
            continue
        if any(user in shared or said[user] == 1 - half for user in node.users):
            shared.add(node)
    said.update(dict.fromkeys(shared))
    return said


def _writes(node: fx.Node) -> bool:
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable


_KINDS: dict[Any, str] = {
    ALL_REDUCE: "all_reduce",
    ALL_GATHER: "all_gather",
    REDUCE_SCATTER: "reduce_scatter",
    c10d.all_to_all_single.default: "all_to_all",
}
