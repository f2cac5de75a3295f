"""reduce_scatter_by_all_to_all: on gloo, a reduce-scatter is an all-to-all and a local sum.

    before (2 ranks, cpu)                         after
    %0: f32[4,8] = reduce_scatter(%g, sum, dp)    %0: f32[8,8] = all_to_all(%g, dp)
    %1 = wait(%0)                                 %1 = wait(%0)
                                                  %2: f32[4,8] = sum(reshape(%1, [2,4,8]), 0)

Gloo has no reduce-scatter: torch's all-reduces a copy of the whole tensor and throws most of it
away. The exchange sends half of that, what the ledger says of a ring: (n - 1) / n of the tensor.
The sum is in the order of the ranks, on every rank.

Runs last, on the graphs that are compiled: `Program.collectives` lists the reduce-scatter, of which
this is one way to do it. Other backends, such as NCCL, have their own.
"""

import operator
from dataclasses import dataclass

from torch import fx

from autoshard.passes.base import Context, Pass, Report, maker, replace
from autoshard.passes.lib.bucketing import REDUCE_SCATTER, WAIT, aten, c10d

ALL_TO_ALL = c10d.all_to_all_single.default


@dataclass(frozen=True)
class ReduceScatterByAllToAll(Pass, optional=True):
    """No options."""

    def rewrite(self, gm: fx.GraphModule, ctx: Context, report: Report) -> None:
        """Rewrite in place the reduce-scatters of tensors in the memory of the host."""
        for node in list(gm.graph.nodes):
            users = list(node.users)
            if node.target is not REDUCE_SCATTER or len(users) != 1 or users[0].target is not WAIT:
                continue
            val, wait = node.meta["val"], users[0]
            source, op, n, group = node.args
            if val.device.type != "cpu" or op != "sum":
                continue
            make = maker(node, self.name)
            with gm.graph.inserting_before(node):
                # symbolic sizes of the result are nodes, which a graph can be run with
                rows, *rest = (
                    size if isinstance(size, int) else make(aten.sym_size.int, source, dim)
                    for dim, size in enumerate(val.shape)
                )
                if isinstance(rows, fx.Node):
                    rows = make(operator.floordiv, rows, n)
                exchanged = make(ALL_TO_ALL, source, [rows] * n, [rows] * n, group)
            with gm.graph.inserting_before(wait):
                arrived = make(WAIT, exchanged)
                blocks = make(aten.reshape.default, arrived, [n, rows, *rest])
                replace(wait, make(aten.sum.dim_IntList, blocks, [0]))
            gm.graph.erase_node(node)
            report.hits += 1
