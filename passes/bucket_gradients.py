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
(DDP, the outer axis of a hybrid mesh, and on `tp` the weights used as V: norms, row biases) and
reduce-scatters (FSDP; each member is laid out by ranks, so that a rank's part is contiguous).

Not done: tied and expert weights have no buckets of their own; a tied weight has one gradient here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from autoshard.passes.base import Context, Report
from autoshard.passes.buckets import (
    ALL_REDUCE,
    REDUCE_SCATTER,
    WAIT,
    Maker,
    Member,
    aten,
    fill,
    member,
    numel,
    replace,
    single_chains,
    sort_stable,
)


@dataclass(frozen=True)
class BucketGradients:
    """groups: the process groups of the axes to merge on, in the order in which a gradient passes
    them (tp, dp_shard, dp_replicate). bucket_bytes: a bucket closes at this size."""

    name: ClassVar[str] = "bucket_gradients"
    groups: tuple[str, ...]
    bucket_bytes: int | None = None

    def run(self, gm: fx.GraphModule, ctx: Context) -> Report:
        """Merge in place. One axis after another: merging on one changes the order of the next."""
        report = Report(self.name)
        for group in self.groups:
            last = single_chains(gm.graph)
            members = []
            for node in gm.graph.nodes:
                if node.target in (ALL_REDUCE, REDUCE_SCATTER) and node.args[-1] == group:
                    found = member(node)
                    if found is not None and node in last:
                        members.append(found)
            for bucket in fill(members, self.bucket_bytes):
                _merge(gm.graph, bucket, self.name)
                report.hits += len(bucket)
            sort_stable(gm.graph)
        return report


def _merge(graph: fx.Graph, bucket: list[Member], provenance: str) -> None:
    first, last = bucket[0].node, bucket[-1].node
    scatter = first.target is REDUCE_SCATTER
    ranks = first.args[2] if scatter else 1
    assert isinstance(ranks, int)
    make = Maker(graph, bucket, provenance)
    with graph.inserting_before(last):
        # one row a rank: what a rank receives is then contiguous
        rows = [make(aten.reshape.default, one.source, [ranks, -1]) for one in bucket]
        flat = make(aten.reshape.default, make(aten.cat.default, rows, 1), [-1])
        reduced = make(WAIT, make(first.target, flat, *first.args[1:]))  # type: ignore[arg-type]
        results, start = [], 0
        for one in bucket:
            shape = list(one.wait.meta["val"].shape)
            end = start + numel(shape)
            part = make(aten.slice.Tensor, reduced, 0, start, end)
            results.append(make(aten.reshape.default, part, shape))
            start = end
    replace(bucket, results)
