"""bucket_parameters: gathers of parameters that are used one after another become one gather.

    before (4 ranks)                                after
    %0: f32[512,512] = all_gather(%w)               %p: f32[256] = cat(%n[128], %b[128])
    %1 = wait(%0)                                   %g = all_gather([%w, %v, %p])
    ...                                             %1: f32[512,512] = wait(%g[0])
    %2: f32[512,512] = all_gather(%v)               %3: f32[512,512] = wait(%g[1])
    %3 = wait(%2)                                   %4: f32[1024] = wait(%g[2])
    ... (norm %n and bias %b likewise)              %n', %b' = columns of reshape(%4, [4, 256])

One collective with a result a weight: a large weight is copied neither into a bucket nor out of it,
and is freed after its own last use. (NCCL runs the parts as one group; gloo, which sends flat
tensors only, copies in its own threads, as it does for a single gather.) Small ones, of which a
model has many, share one flat result: each result costs the host a wait. Not those whose rows are
read by index, which Inductor cannot compile on a part of a flat result.

Works on the forward and on the backward graph (ZeRO-3 gathers again there, in the order of
backward). Only gathers whose input comes from graph inputs alone are merged, also through gathers
over another axis, which are merged before: their order can be chosen freely, and the bucket stands
where its first member stood.

Not done: padding (an uneven shard is padded before its own gather, which reaches here as a member
of even size).
"""

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autoshard.passes.base import Context, Pass, Report
from autoshard.passes.lib.bucketing import (
    ALL_GATHER,
    GATHER_TOGETHER,
    WAIT,
    Member,
    aten,
    bucket_maker,
    fill,
    made_from,
    member,
    replace_members,
)
from autoshard.planning import LOOKUPS, packet


@dataclass(frozen=True)
class BucketParameters(Pass, optional=True):
    """bucket_bytes: the most that a bucket holds, gathered; None: `bucket_size`.

    apart: process group whose gathers are not bucketed, that of tp. A checkpointed region's
    gathers over it are made from inputs of the backward graph, too: merged, all would be alive from
    its start.
    """

    bucket_bytes: int | None = None
    apart: str = ""

    def rewrite(self, gm: fx.GraphModule, ctx: Context, report: Report) -> None:
        """Merge in place."""
        for group in _groups(gm.graph, self.apart):
            for bucket in fill(_members(gm.graph, group), self.bucket_bytes, most=True):
                _merge(gm.graph, bucket, self.name)
                report.hits += len(bucket)


def _groups(graph: fx.Graph, apart: str) -> list[str]:
    """The process groups of gathers, in the order of the graph: that of dp_shard before that of cp,
    which gathers what the first has gathered."""
    found: list[str] = [str(n.args[2]) for n in graph.nodes if n.target is ALL_GATHER]
    return [group for group in dict.fromkeys(found) if group != apart]


def _members(graph: fx.Graph, group: str) -> list[Member]:
    """The gathers over a group of what comes from graph inputs alone, gathered by others or not."""
    free: set[fx.Node] = set()
    members = []
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            free.add(node)
        elif node.op == "call_function" and all(n in free for n in node.all_input_nodes):
            own = node.target is ALL_GATHER and node.args[2] == group
            found = member(node) if own else None
            if found is not None:
                members.append(found)
            else:
                free.add(node)
    return members


def _merge(graph: fx.Graph, bucket: list[Member], provenance: str) -> None:
    first = bucket[0].node
    # what stands before it may have users there
    for node in sorted(set().union(*(made_from(one.source, first) for one in bucket))):
        first.prepend(node)
    small = [one for one in bucket if one.nbytes < _SMALL and not _is_looked_up(one.wait)]
    packed = small if len(small) > 1 else []
    apart = [one for one in bucket if one not in packed]
    make = bucket_maker(bucket, provenance)
    with graph.inserting_before(first):
        sources = [one.source for one in apart]
        if packed:
            flat = [make(aten.reshape.default, one.source, [-1]) for one in packed]
            sources.append(make(aten.cat.default, flat))
        if len(sources) == 1:
            results = [make(ALL_GATHER, sources[0], *first.args[1:])]  # type: ignore[arg-type]
        else:
            started = make(GATHER_TOGETHER, sources, *first.args[1:])  # type: ignore[arg-type]
            results = [make(operator.getitem, started, i) for i in range(len(sources))]
        waits = [make(WAIT, result) for result in results]
        unpacked = _unpack(make, waits[-1], packed) if packed else []
    replace_members(apart, waits[: len(apart)])
    replace_members(packed, unpacked)


_SMALL = 1 << 18  # bytes: what costs less to copy than to wait for by itself
_PASSED = (aten._to_copy.default, aten.reshape.default, aten.view.default, aten.slice.Tensor)


def _is_looked_up(weight: fx.Node) -> bool:
    """Whether rows of a weight are read by index: Inductor cannot index by data what it would read
    through the columns of a flat result."""
    return any(
        packet(user) in LOOKUPS or (user.target in _PASSED and _is_looked_up(user))
        for user in weight.users
    )


def _unpack(make: Callable[..., fx.Node], gathered: fx.Node, packed: list[Member]) -> list[fx.Node]:
    """The weights in a flat result: each rank's part of it is one row."""
    ranks: Any = packed[0].node.args[1]
    rows = make(aten.reshape.default, gathered, [ranks, -1])
    results, start = [], 0
    for one in packed:
        end = start + one.source.meta["val"].numel()
        columns = make(aten.slice.Tensor, rows, 1, start, end)
        whole = make(aten.reshape.default, columns, list(one.wait.meta["val"].shape))
        if not whole.meta["val"].is_contiguous():
            # one row a rank is reshaped without a copy, and views of the result were traced of a
            # contiguous one
            whole = make(aten.clone.default, whole, memory_format=torch.contiguous_format)
        results.append(whole)
        start = end
    return results
