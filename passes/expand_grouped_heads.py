"""expand_grouped_heads: repeat the key and value heads that the axis cannot split among ranks.

    before (tp=4)                                   after
    %q: f32[2,8,16,4]                               %q: f32[2,8,16,4]
    %k: f32[2,2,16,4]                               %k: f32[2,2,16,4]
    %v: f32[2,2,16,4]                               %v: f32[2,2,16,4]
    %0: f32[2,8,16,4] =                             %0: f32[2,2,1,16,4] = unsqueeze(%k, 2)
        scaled_dot_product_attention(%q, %k, %v,    %1: f32[2,2,4,16,4] =
            enable_gqa=True)                            expand(%0, [-1, -1, 4, -1, -1])
                                                    %2: f32[2,8,16,4] =
                                                        reshape(%1, [2, 8, 16, 4])
                                                    ... the same for %v ...
                                                    %6: f32[2,8,16,4] =
                                                        scaled_dot_product_attention(%q, %2, %5)

With as many key heads as query heads, attention shards by heads: keys and values are computed
whole and each rank keeps, for free, the heads its queries need. The result is the same.

Not done: where the axis divides the key heads (they shard as they are), or does not divide the
query heads (nothing would shard).
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autoshard.passes.base import Context, Pass, Report, maker

aten = torch.ops.aten


@dataclass(frozen=True)
class ExpandGroupedHeads(Pass, optional=True):
    """See the module's text."""

    def rewrite(self, gm: fx.GraphModule, ctx: Context, report: Report) -> None:
        attention = aten.scaled_dot_product_attention.default
        for node in gm.graph.find_nodes(op="call_function", target=attention):
            if not node.kwargs.get("enable_gqa"):
                continue
            query, key, value = (arg.meta["val"].shape[-3] for arg in node.args[:3])
            n = ctx.axis.size
            if not all(isinstance(heads, int) for heads in (query, key, value)):
                report.skip(node, f"heads {query}, {key}, {value} are symbolic")
            elif key % n == 0 and value % n == 0:
                report.skip(node, f"kv heads {key} % {ctx.axis.name} {n} == 0: no need")
            elif query % n != 0:
                report.skip(node, f"heads {query} % {ctx.axis.name} {n} != 0")
            else:
                with gm.graph.inserting_before(node):
                    both = [self._repeat(node, arg, query) for arg in node.args[1:3]]
                node.args = (node.args[0], *both, *node.args[3:])
                node.kwargs = {k: v for k, v in node.kwargs.items() if k != "enable_gqa"}
                report.hits += 1

    def _repeat(self, user: fx.Node, source: Any, heads: int) -> fx.Node:
        make = maker(user, self.name)
        shape = source.meta["val"].shape
        dim = len(shape) - 3
        if shape[dim] == heads:
            return source  # type: ignore[no-any-return]
        widths = [-1] * (len(shape) + 1)
        widths[dim + 1] = heads // shape[dim]
        sizes = [
            size if isinstance(size, int) else make(aten.sym_size.int, source, d)
            for d, size in enumerate(shape)
        ]
        sizes[dim] = heads
        wide = make(aten.expand.default, make(aten.unsqueeze.default, source, dim + 1), widths)
        return make(aten.reshape.default, wide, sizes)
