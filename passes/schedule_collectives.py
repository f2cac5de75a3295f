"""schedule_collectives: every collective starts as soon, and is waited for as late, as it can be.

    before                                        after
    %0 = all_reduce(%b1, sum, dp)                 %0 = all_reduce(%b1, sum, dp)
    %1 = wait(%0)                                 %2 = mm(...)
    %2 = mm(...)                                  %3 = all_reduce(%b2, sum, dp)
    %3 = all_reduce(%b2, sum, dp)                 %1 = wait(%0)
    %4 = wait(%3)                                 %4 = wait(%3)
    return (%1, %4, %2)                           return (%1, %4, %2)

A wait moves to its first reader that is not a view; the waits of gradients so reach the end of
backward. Each bucket of parameter gathers starts where the bucket before it is waited for: one
bucket ahead, so that at most two are held.

The order is a function of the graph alone, from the first step on, and the order of the starts
within one process group does not change, so that all ranks agree on it.

Not done: a cost model of what overlaps with what; prefetching further than one bucket; on a
hybrid mesh, the all-reduce of a bucket's shards still waits at once for their reduce-scatter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from autoshard.passes.base import Context, Report
from autoshard.passes.buckets import ALL_GATHER, COLLECTIVES, WAIT, aten, single_chains

_VIEWS = (aten.slice.Tensor, aten.reshape.default, aten.view.default, aten.permute.default)


@dataclass(frozen=True)
class ScheduleCollectives:
    """prefetch: start a gather of parameters at the wait of the one before it."""

    name: ClassVar[str] = "schedule_collectives"
    prefetch: bool = True

    def run(self, gm: fx.GraphModule, ctx: Context) -> Report:
        """Reorder in place."""
        report = Report(self.name)
        if self.prefetch:
            report.hits += _prefetch(gm.graph)
        report.hits += _sink_waits(gm.graph)
        return report


def _prefetch(graph: fx.Graph) -> int:
    """Start each input-only gather where the one before it in its group is waited for."""
    waited: dict[object, fx.Node] = {}
    order = {node: i for i, node in enumerate(graph.nodes)}
    inputs_only = _inputs_only(graph)
    moved = 0
    for node in list(graph.nodes):
        if node.target is not ALL_GATHER or node not in inputs_only:
            continue
        group, before = node.args[-1], waited.get(node.args[-1])
        waits = [user for user in node.users if user.target is WAIT]
        if before is not None:
            needed = sorted(_above(node, order[before], order), key=order.__getitem__)
            for one in needed:
                before.prepend(one)
            moved += 1
        if waits:
            waited[group] = waits[0]
    return moved


def _inputs_only(graph: fx.Graph) -> set[fx.Node]:
    found: set[fx.Node] = set()
    for node in graph.nodes:
        sources = node.all_input_nodes
        if node.op in ("placeholder", "get_attr") or (
            node.op == "call_function"
            and node.target is not WAIT
            and all(source in found for source in sources)
        ):
            found.add(node)
    return found


def _above(node: fx.Node, limit: int, order: dict[fx.Node, int]) -> set[fx.Node]:
    """`node` and what it is made from, of the nodes that stand after position `limit`."""
    if order[node] < limit or node.op != "call_function":
        return set()
    return {node}.union(*(_above(source, limit, order) for source in node.all_input_nodes))


def _sink_waits(graph: fx.Graph) -> int:
    """Move each wait, and what only reshapes or finishes it, to the first reader."""
    finishing = single_chains(graph)
    leader: dict[fx.Node, fx.Node] = {}  # the first node moved in front of a reader
    moved = 0
    # from the end, so that a reader has its place before what it reads
    for node in reversed(list(graph.nodes)):
        if not node.users or not _late(node, finishing):
            continue
        reader = min(node.users)
        before = leader.get(reader, reader)
        before.prepend(node)
        leader[reader] = node
        moved += node.target is WAIT
    return moved


def _late(node: fx.Node, finishing: set[fx.Node]) -> bool:
    """A wait, or a view or last step of a gradient whose one input is late."""
    while node.op == "call_function" and node.target not in COLLECTIVES:
        if node.target is WAIT:
            return True
        if len(node.all_input_nodes) != 1 or (node.target not in _VIEWS and node not in finishing):
            return False
        node = node.all_input_nodes[0]
    return False
