"""match_experts: a mixture of experts becomes one node, which shards as a whole.

    before                                          after
    %x: f32[6,8]                                    %x: f32[6,8]
    %ids: i64[6,2]                                  %ids: i64[6,2]
    %weights: f32[6,2]                              %weights: f32[6,2]
    %up: f32[4,16,8]                                %up: f32[4,16,8]
    %down: f32[4,8,16]                              %down: f32[4,8,16]
    %0: i64[12] = reshape(%ids, [-1])               %0: f32[6,8] = experts(%x, %ids, %weights,
    %1: (i64[12], i64[12]) = sort(%0)                   [%up, %down], body)
    ... rows by expert, grouped_mm, relu,
        grouped_mm, times weight, back in order
    %20: f32[6,2,8] = reshape(%19, [6,2,8])
    %21: f32[6,8] = sum(%20, [1])

Found from the structure alone: experts' numbers that are sorted, tokens picked in that order,
products of those rows and stacks of matrices between the ends of each expert's rows, weights of
the router, the order undone, and a sum over a token's rows. What lies between the products (the
body) is any program that keeps rows apart. The operator computes the same numbers, bit by bit.

Not done: loops over experts, and products of every expert with every token (`bmm`), which shard
operator by operator; what is near a mixture and is none is in the report and in
`meta[MIXTURES]`, for `explain`. On one rank of tp or cp nothing is gained, unless there is an axis
ep (`exchange_experts`).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import fx

from autoshard.passes.base import Context, Report, emit, user_line
from autoshard.passes.expert_routes import NotExperts, Route, find_route, product_name
from autoshard.passes.expert_rows import RowProgram
from autoshard.runtime.graph_meta import MIXTURES
from autoshard.runtime.operators import EXPERTS

aten = torch.ops.aten


class MixtureFound(NamedTuple):
    """A mixture of experts in a graph, or products of experts that are none as they are written.

    what: "4 experts, 2 a token"; "" where it is not matched, because of `reason`.
    """

    what: str
    reason: str
    where: str


@dataclass(frozen=True)
class MatchExperts:
    """See the module's text. exchanges: whether there is an axis ep."""

    name: ClassVar[str] = "match_experts"
    optional: ClassVar[bool] = True
    exchanges: bool = False

    def run(self, gm: fx.GraphModule, ctx: Context) -> Report:
        """Rewrite `gm.graph` in place."""
        report, found = Report(self.name), Counter[MixtureFound]()
        products = [node for node in gm.graph.nodes if product_name(node)]
        if (ctx.axis.size == 1 and not self.exchanges) or not products:
            return report
        done: set[fx.Node] = set()
        for node in products:
            if node in done:
                continue
            try:
                route = find_route(node)
                done.update(self._replace(gm.graph, route))
            except NotExperts as reason:
                report.skip(node, str(reason))
                found[MixtureFound("", str(reason), user_line(node))] += 1
                continue
            what = f"{route.experts} experts, {route.k} a token"
            found[MixtureFound(what, "", user_line(node))] += 1
            report.hits += 1
        gm.graph.eliminate_dead_code()
        gm.meta[MIXTURES] = found
        return report

    def _replace(self, graph: fx.Graph, route: Route) -> list[fx.Node]:
        """The products of the mixture, which one node has replaced."""
        program = RowProgram(route)
        result, body = program.result, program.body().text()
        arguments: list[Any] = [program.x, route.ids, program.weights, program.stacks, body]
        with graph.inserting_before(result):
            node = emit(graph, result, EXPERTS, arguments, provenance=self.name, value=result)
        result.replace_all_uses_with(node)
        return program.products
