"""schedule_collectives: every collective starts as soon, and is waited for as late, as it can be.

    before                                        after
    %0 = all_reduce(%b1, sum, dp)                 %0 = all_reduce(%b1, sum, dp)
    %1 = wait(%0)                                 %2 = mm(...)
    %2 = mm(...)                                  %3 = all_reduce(%b2, sum, dp)
    %3 = all_reduce(%b2, sum, dp)                 %1 = wait(%0)
    %4 = wait(%3)                                 %4 = wait(%3)
    return (%1, %4, %2)                           return (%1, %4, %2)

A wait moves to its first reader that is not a view; the waits of gradients so reach the end of
backward, except that a reduce-scatter is waited for before the next one starts. Each bucket of
parameter gathers starts when the bucket before it has arrived: one bucket ahead, so that at most
two are held; and not ahead where the two are more than both the largest gather of the graph and two
full buckets.

On a hybrid mesh a bucket is scattered over the inner axis and then reduced over the outer one. The
second waits for the first, and so starts where the next bucket's first one has started: each
overlaps with the making of one more bucket.

The order is a function of the graph alone, from the first step on, and the order of the starts
within one process group does not change, so that all ranks agree on it.

Not done: a cost model of what overlaps with what; prefetching further than one bucket.
"""

from dataclasses import dataclass

from torch import fx

from autoshard.passes.base import Context, Pass, Report
from autoshard.passes.lib.bucketing import (
    ALL_REDUCE,
    BUCKETED_GRADIENT,
    COLLECTIVES,
    GATHER_TOGETHER,
    GATHERS,
    REDUCE_SCATTER,
    WAIT,
    bucket_size,
    gathered,
    made_from,
    single_chains,
    sort_stable,
    waits_of,
)
from autoshard.planning import is_view
from autoshard.runtime.graph_meta import PASS


@dataclass(frozen=True)
class ScheduleCollectives(Pass, optional=True):
    """bucket_bytes: as in the bucketing passes; None: their default."""

    bucket_bytes: int | None = None

    def rewrite(self, gm: fx.GraphModule, ctx: Context, report: Report) -> None:
        """Reorder in place."""
        report.hits += _prefetch(gm.graph, self.bucket_bytes)
        report.hits += _delay_second_stages(gm.graph)
        report.hits += _sink_waits(gm.graph)
        _limit_in_flight(gm.graph)


def _prefetch(graph: fx.Graph, bucket_bytes: int | None) -> int:
    """Start each input-only gather where the one before it in its group has arrived."""
    arrived: dict[object, fx.Node] = {}
    held: dict[object, int] = {}
    order = {node: i for i, node in enumerate(graph.nodes)}
    inputs_only = _inputs_only(graph)
    gathers = [n for n in graph.nodes if n.target in GATHERS and n in inputs_only]
    members = {node: gathered(node) for node in gathers}
    sizes = {node: sum(one.nbytes for one in found) for node, found in members.items()}
    every = [one for found in members.values() for one in found]
    limit = bucket_size(every) if bucket_bytes is None else bucket_bytes
    most = max(2 * limit, *sizes.values()) if sizes else 0
    moved = 0
    for node in gathers:
        group, waits = node.args[-1], waits_of(node)
        before = arrived.get(group) if held.get(group, 0) + sizes[node] <= most else None
        held[group] = sizes[node]
        if before is not None:
            # what a gather over another axis has taken further up stays there
            needed = sorted(made_from(node, before), key=order.__getitem__)
            for one in reversed(needed):
                before.append(one)
            moved += 1
        if waits:
            arrived[group] = max(waits, key=order.__getitem__)
    return moved


def _delay_second_stages(graph: fx.Graph) -> int:
    """Start a reduction of a reduced bucket after the next bucket's first reduction."""
    delayed: dict[fx.Node, list[fx.Node]] = {}
    finishing = single_chains(graph)
    following: fx.Node | None = None
    for node in reversed(list(graph.nodes)):
        if node.target is REDUCE_SCATTER:
            following = node
        if node.target is not ALL_REDUCE or following is None or node not in finishing:
            continue
        stage = [node]
        while stage[-1].target is not WAIT and len(stage[-1].all_input_nodes) == 1:
            stage.append(stage[-1].all_input_nodes[0])
        first = stage[-1].args[0] if stage[-1].target is WAIT else None
        if isinstance(first, fx.Node) and first.target is REDUCE_SCATTER:
            delayed.setdefault(following, []).extend(stage)
    for start, stages in delayed.items():
        for node in stages:  # the last ones first
            start.append(node)
    if delayed:
        sort_stable(graph)
    return len(delayed)


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


def _sink_waits(graph: fx.Graph) -> int:
    """Move each wait, and nodes that only reshape or finish it, to the first reader."""
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
    for node in graph.nodes:
        if node.target is GATHER_TOGETHER:
            first, *rest = sorted(waits_of(node))
            for wait in reversed(rest):  # when one has arrived, all have
                first.append(wait)
                (result,) = wait.all_input_nodes
                # A gather that one over another axis reads has moved up with that result alone.
                if first < result:
                    first.append(result)
    return moved


def _limit_in_flight(graph: fx.Graph) -> None:
    """Wait for a reduce-scatter of gradients before the next one starts.

    It holds the whole bucket until then, of which a rank keeps a part, and overlaps with the making
    of the next bucket as it is: two under way would share one network. (The bucket of an all-reduce
    becomes the gradients: to wait for it earlier would free nothing.)
    """
    finishing = single_chains(graph)
    starts = [n for n in graph.nodes if n.target is REDUCE_SCATTER and n in finishing]
    for start, later in zip(starts, starts[1:]):
        wait = next(iter(start.users))
        # of the next bucket some may be the pieces of an earlier one, of this one too
        making = min(n for n in {later, *_made_by_bucketing(later)} if start < n)
        if wait.target is WAIT and making < wait:
            making.prepend(wait)


def _made_by_bucketing(node: fx.Node) -> set[fx.Node]:
    """A merged reduction and the nodes that put its bucket together."""
    if (node.meta.get("custom") or {}).get(PASS) != BUCKETED_GRADIENT:
        return set()
    return {node}.union(*(_made_by_bucketing(source) for source in node.all_input_nodes))


def _late(node: fx.Node, finishing: set[fx.Node]) -> bool:
    """A wait, or a view or last step of a gradient whose one input is late."""
    while node.op == "call_function" and node.target not in COLLECTIVES:
        if node.target is WAIT:
            return True
        if len(node.all_input_nodes) != 1 or (not is_view(node) and node not in finishing):
            return False
        node = node.all_input_nodes[0]
    return False
