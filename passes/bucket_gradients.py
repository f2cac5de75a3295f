"""bucket_gradients: reductions of gradients that become ready one after another become one.

    before (2 ranks)                                      after
    %0: f32[8,4] = all_reduce(%g, sum, dp)                ...
    %1 = wait(%0)                                         %b: f32[48] = cat(%g[32], %h[16])
    ...                                                   %0: f32[48] = all_reduce(%b, sum, dp)
    %2: f32[4,4] = all_reduce(%h, sum, dp)                %1 = wait(%0)
    %3 = wait(%2)                                         %g', %h' = slices of %1, reshaped
    return (%1, %3)                                       return (%g', %h')

A reduction belongs to a gradient where everything that follows it is a chain of single users that
ends in the output: no other computation waits for it, so that it may come later. All-reduces
(DDP, the outer axis of a hybrid mesh, and on `tp` the weights used as R: norms, row biases) and
reduce-scatters (FSDP; each member is laid out by ranks, so that a rank's part is contiguous).
Gradients leave as views of the bucket, at the places that `aligned` gives them.

On a hybrid mesh the all-reduce over the outer axis takes the reduced bucket of the inner one as it
is: one for one, with no copy between.
"""

from dataclasses import dataclass
from typing import Any

from torch import fx

from autoshard.passes.base import Context, Pass, Report
from autoshard.passes.lib.bucketing import (
    ALL_REDUCE,
    REDUCE_SCATTER,
    WAIT,
    Member,
    aten,
    bucket_maker,
    erase_unread,
    fill,
    last_collectives,
    member,
    replace_members,
    sort_stable,
)
from autoshard.planning import RESHAPES, packet
from autoshard.planning.cost import aligned


@dataclass(frozen=True)
class BucketGradients(Pass, optional=True):
    """groups: process groups of the axes to merge on, in the order in which a gradient passes them
    (tp, dp_shard, dp_replicate). bucket_bytes: size at which a bucket closes."""

    groups: tuple[str, ...]
    bucket_bytes: int | None = None

    def rewrite(self, gm: fx.GraphModule, ctx: Context, report: Report) -> None:
        """Merge in place. One axis after another: merging on one changes the order of the next."""
        for group in self.groups:
            last = last_collectives(gm.graph, group)
            members = []
            for node in gm.graph.nodes:
                if node.target in (ALL_REDUCE, REDUCE_SCATTER) and node in last:
                    found = member(node)
                    if found is not None:
                        members.append(found)
            stages = _stages(members)
            for wait, bucket in stages.items():
                _continue(gm.graph, wait, bucket, self.name)
                report.hits += len(bucket)
            staged = {one.node for bucket in stages.values() for one in bucket}
            rest = [one for one in members if one.node not in staged]
            for bucket in fill(rest, self.bucket_bytes):
                _merge(gm.graph, bucket, self.name)
                report.hits += len(bucket)
            sort_stable(gm.graph)


def _stages(members: list[Member]) -> dict[fx.Node, list[Member]]:
    """The members that are the pieces of one reduced bucket, all of them, by the bucket's wait.

    Only what is all-reduced next: a scatter of the bucket would not be a scatter of its pieces.
    """
    found: dict[fx.Node, list[Member]] = {}
    for one in members:
        if one.node.target is not ALL_REDUCE:
            continue
        source = _undivided(one.source)
        while packet(source) in _PIECES:
            source = source.args[0]  # type: ignore[assignment]
        if source.target is WAIT and len(source.users) > 1:
            found.setdefault(source, []).append(one)
    return {
        wait: bucket
        for wait, bucket in found.items()
        if len(bucket) == len(wait.users)
        and len({(*one.key, _divisor(one.source)) for one in bucket}) == 1
    }


_PIECES = RESHAPES | {aten.slice}


def _divisor(source: fx.Node) -> Any:
    """The number that a piece is divided by on its way; None: it is not divided."""
    return source.args[1] if source.target is aten.div.Tensor else None


def _undivided(source: fx.Node) -> fx.Node:
    return source.args[0] if source.target is aten.div.Tensor else source  # type: ignore[return-value]


def _continue(graph: fx.Graph, wait: fx.Node, bucket: list[Member], provenance: str) -> None:
    """Reduce the bucket that ended in `wait` once more, instead of its pieces."""
    first = bucket[0]
    make = bucket_maker(bucket, provenance)
    pieces = list(wait.users)
    with graph.inserting_after(wait):
        at = wait
        divisor = _divisor(first.source)
        if divisor is not None:
            at = make(aten.div.Tensor, at, divisor)
    with graph.inserting_after(at):
        started = make(first.node.target, at, *first.node.args[1:])  # type: ignore[arg-type]
    with graph.inserting_after(started):
        reduced = make(WAIT, started)
    for piece in pieces:
        piece.replace_input_with(wait, reduced)
    replace_members(bucket, [_undivided(one.source) for one in bucket])
    erase_unread(one.source for one in bucket)


def _merge(graph: fx.Graph, bucket: list[Member], provenance: str) -> None:
    first, last = bucket[0].node, bucket[-1].node
    scatter = first.target is REDUCE_SCATTER
    ranks = first.args[2] if scatter else 1
    assert isinstance(ranks, int)
    sizes = [one.source.meta["val"].numel() // ranks for one in bucket]
    starts, total = aligned(sizes, ranks)
    make = bucket_maker(bucket, provenance)
    with graph.inserting_before(last):
        rows: list[fx.Node] = []
        ends = [*starts[1:], total]
        for one, size, start, end in zip(bucket, sizes, starts, ends, strict=True):
            # one row a rank: what a rank receives is then contiguous
            row = make(aten.reshape.default, _undivided(one.source), [ranks, size])
            if end - start > size:
                row = make(aten.constant_pad_nd.default, row, [0, end - start - size], 0.0)
            divisor = _divisor(one.source)
            # divided last, so that the division itself writes into the bucket
            rows.append(row if divisor is None else make(aten.div.Tensor, row, divisor))
        flat = make(aten.reshape.default, make(aten.cat.default, rows, 1), [ranks * total])
        reduced = make(WAIT, make(first.target, flat, *first.args[1:]))  # type: ignore[arg-type]
        results = []
        for one, size, start in zip(bucket, sizes, starts, strict=True):
            part = make(aten.slice.Tensor, reduced, 0, start, start + size)
            results.append(make(aten.reshape.default, part, list(one.wait.meta["val"].shape)))
    replace_members(bucket, results)
    erase_unread(one.source for one in bucket)
