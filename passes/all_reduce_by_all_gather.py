"""all_reduce_by_all_gather: on gloo, a small all-reduce is an all-gather and a local reduction.

    before (2 ranks, cpu)                         after
    %0: f32[4,8] = all_reduce(%p, sum, tp)        %0: f32[1,4,8] = unsqueeze(%p, 0)
    %1 = wait(%0)                                 %1: f32[2,4,8] = all_gather(%0, tp)
                                                  %2 = wait(%1)
                                                  %3: f32[4,8] = sum(%2, [0])

An all-reduce takes two rounds of messages, an all-gather one. Up to a few hundred kilobytes the
rounds are the time: a token of a model that generates has two such sums a layer. Every rank adds
in the order of the ranks, and gets the same bits.

Runs last, on the graphs that are compiled: `Program.collectives` lists the all-reduce, of which
this is one way to do it. NCCL has a protocol of its own for small messages.
"""

from dataclasses import dataclass

from torch import fx

from autoshard.passes.base import Context, Pass, Report, maker
from autoshard.passes.lib.bucketing import (
    ALL_GATHER,
    ALL_REDUCE,
    WAIT,
    aten,
    member,
    replace_members,
)
from autoshard.planning.cost import ONE_SHOT_BYTES


@dataclass(frozen=True)
class AllReduceByAllGather(Pass, optional=True):
    """No options."""

    def rewrite(self, gm: fx.GraphModule, ctx: Context, report: Report) -> None:
        """Rewrite in place the small all-reduces of the planned axis in the memory of the host."""
        n = ctx.axis.size
        for node in list(gm.graph.nodes):
            if node.target is not ALL_REDUCE or node.args[2] != ctx.axis.group:
                continue
            found = member(node)
            reduction = _REDUCTIONS.get(str(node.args[1]))
            val = node.meta["val"]
            if found is None or reduction is None or val.device.type != "cpu":
                continue
            if not val.is_floating_point() or n * found.nbytes > ONE_SHOT_BYTES:
                report.skip(node, f"{n} x {found.nbytes} bytes of {val.dtype}")
                continue
            make = maker(node, self.name)
            with gm.graph.inserting_before(node):
                row = make(aten.unsqueeze.default, found.source, 0)
                gathered = make(ALL_GATHER, row, n, ctx.axis.group)
            with gm.graph.inserting_before(found.wait):
                whole = make(reduction, make(WAIT, gathered), [0])
            replace_members([found], [whole])
            report.hits += 1


_REDUCTIONS = {
    "sum": aten.sum.dim_IntList,
    "max": aten.amax.default,
    "min": aten.amin.default,
}
