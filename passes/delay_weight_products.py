"""delay_weight_products: what only a weight's gradient waits for is computed beside a collective.

    before (backward, tp=2)                        after
    %0 = mm(%g, %w)                                %0 = mm(%g, %w)
    %1 = mm(t(%g), %x)                             %2 = all_reduce(%0, sum, tp)
    %2 = all_reduce(%0, sum, tp)                   %1 = mm(t(%g), %x)
    %3 = wait(%2)                                  %3 = wait(%2)
    ... = %3                                       ... = %3

The gradient of the input of a column-parallel layer is summed over the ranks, as an all-reduce or
as a reduce-scatter, and the rest of backward waits for it. The gradient of the layer's weight needs
none of it, so that its product runs meanwhile, as in Megatron-Core; for q, k and v the products of
all three do. They hold the gradient of the layer's output for that long.

Works before gradients are put into buckets, on the backward graph; what follows such a product, as
far as it is there already, moves along.

Not done: a gather of the backward of a row-parallel layer, for which its own two products wait,
could run beside those of the layer before, which would hold their operands for longer.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from autoshard.passes.base import Context, Pass, Report
from autoshard.passes.lib.bucketing import COLLECTIVES, WAIT, last_collectives
from autoshard.planning import PRODUCTS, is_view, packet, reached


@dataclass(frozen=True)
class DelayWeightProducts(Pass, optional=True):
    """No options."""

    def rewrite(self, gm: fx.GraphModule, ctx: Context, report: Report) -> None:
        """Reorder in place the products of a backward graph."""
        group = ctx.axis.group
        gradients = last_collectives(gm.graph, group)
        awaited = [
            node
            for node in gm.graph.nodes
            if node.target in COLLECTIVES and node.args[-1] == group and node not in gradients
        ]
        weights = _only_for_gradients(gm.graph, set(awaited))
        moved: set[fx.Node] = set()
        for start in awaited:
            read = {_base(one) for made in _products_of(start) for one in made.all_input_nodes}
            beside = [
                one
                for one in weights
                if one < start
                and one not in moved
                and any(_base(operand) in read for operand in one.all_input_nodes)
            ]
            if not beside:
                report.skip(start, "no product of a weight's gradient reads what it is made of")
            moved.update(beside)
            at = start
            for node in sorted({late for one in beside for late in _until(one, start)}):
                at.append(node)
                at = node
            report.hits += len(beside)


def _only_for_gradients(graph: fx.Graph, awaited: set[fx.Node]) -> list[fx.Node]:
    """The products, in order, that no other product and no collective in `awaited` waits for."""
    final: set[fx.Node] = set()
    found = []
    for node in reversed(graph.nodes):
        if node.op == "output":
            final.add(node)
        elif node.users and all(user in final for user in node.users):
            if packet(node) in PRODUCTS:
                found.append(node)
            elif node not in awaited:
                final.add(node)
    return found[::-1]


def _products_of(start: fx.Node) -> list[fx.Node]:
    """The products that a collective sums, in any order."""
    found, pending = [], list(start.all_input_nodes)
    seen: set[fx.Node] = set()
    while pending:
        node = pending.pop()
        if node in seen or node.op != "call_function" or node.target is WAIT:
            continue
        seen.add(node)
        if packet(node) in PRODUCTS:
            found.append(node)
        else:
            pending += node.all_input_nodes
    return found


def _base(node: fx.Node) -> fx.Node:
    """What a node is a view of."""
    while is_view(node) and len(node.all_input_nodes) == 1:
        node = node.all_input_nodes[0]
    return node


def _until(product: fx.Node, start: fx.Node) -> set[fx.Node]:
    """A product and all that follows of it before `start`."""
    return {*reached([product], lambda node: [user for user in node.users if user < start])}
