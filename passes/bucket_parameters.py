"""bucket_parameters: gathers of parameters that are used one after another become one gather.

    before (4 ranks)                                      after
    %0: f32[8,4] = all_gather(%w: f32[2,4])               %b: f32[12] = cat(%w[8], %v[4])
    %1 = wait(%0)                                         %0: f32[48] = all_gather(%b)
    ...                                                   %1 = wait(%0)
    %2: f32[4,4] = all_gather(%v: f32[1,4])               %2: f32[4,12] = reshape(%1)
    %3 = wait(%2)                                         %w', %v' = columns of %2, reshaped

Works on the forward and on the backward graph (ZeRO-3 gathers again there, in the order of
backward). Only gathers whose input comes from graph inputs alone are merged: their order can be
chosen freely, and the bucket stands where its first member stood.

Not done: padding (an uneven shard is padded before its own gather, which reaches here as a member
of even size), and zero-copy layouts: each weight is copied out of the bucket once, as FSDP2 does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from autoshard.passes.base import Context, Report
from autoshard.passes.buckets import (
    ALL_GATHER,
    WAIT,
    Maker,
    Member,
    aten,
    fill,
    member,
    numel,
    replace,
)


@dataclass(frozen=True)
class BucketParameters:
    """bucket_bytes: a bucket closes at this size of its gathered form; None: `default_bytes`.

    apart: a group whose gathers stay. In a backward graph what a checkpointed region gathers again
    over tp is made from inputs, too: merged, all of it would be alive from the start.
    """

    name: ClassVar[str] = "bucket_parameters"
    bucket_bytes: int | None = None
    apart: str = ""

    def run(self, gm: fx.GraphModule, ctx: Context) -> Report:
        """Merge in place."""
        report = Report(self.name)
        free: set[fx.Node] = set()
        members = []
        for node in gm.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                free.add(node)
            elif node.op == "call_function" and all(n in free for n in node.all_input_nodes):
                found = member(node) if node.target is ALL_GATHER else None
                if found is not None and node.args[2] != self.apart:
                    members.append(found)
                else:
                    free.add(node)
        for bucket in fill(members, self.bucket_bytes):
            _merge(gm.graph, bucket, self.name)
            report.hits += len(bucket)
        return report


def _merge(graph: fx.Graph, bucket: list[Member], provenance: str) -> None:
    first = bucket[0].node
    position = {node: i for i, node in enumerate(graph.nodes)}
    needed = set().union(*(_made_from_inputs(one.source) for one in bucket))
    for node in sorted(needed, key=position.__getitem__):
        if position[node] > position[first]:  # what stands before it may have users there
            first.prepend(node)
    size, group = first.args[1], first.args[2]
    assert isinstance(size, int)
    make = Maker(graph, bucket, provenance)
    with graph.inserting_before(first):
        flat = make(aten.cat.default, [make(aten.reshape.default, m.source, [-1]) for m in bucket])
        gathered = make(WAIT, make(ALL_GATHER, flat, size, group))
        rows = make(aten.reshape.default, gathered, [size, -1])
        results, start = [], 0
        for one in bucket:
            end = start + numel(one.source.meta["val"].shape)
            columns = make(aten.slice.Tensor, rows, 1, start, end)
            shape = list(one.wait.meta["val"].shape)
            results.append(make(aten.reshape.default, columns, shape))
            start = end
    replace(bucket, results)


def _made_from_inputs(node: fx.Node) -> set[fx.Node]:
    """The nodes between graph inputs and `node`, itself included."""
    if node.op != "call_function":
        return set()
    return {node}.union(*(_made_from_inputs(n) for n in node.all_input_nodes))
