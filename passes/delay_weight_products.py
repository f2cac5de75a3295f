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
        reading: dict[fx.Node, list[int]] = {}
        for i, one in enumerate(weights):
            for operand in one.all_input_nodes:
                reading.setdefault(_base(operand), []).append(i)
        products = _products_in(gm.graph)
        moved: set[fx.Node] = set()
        for start in awaited:
            made = frozenset[fx.Node]().union(*[products[one] for one in start.all_input_nodes])
            read = {_base(operand) for one in made for operand in one.all_input_nodes}
            numbers = sorted({i for operand in read for i in reading.get(operand, ())})
            beside = [weights[i] for i in numbers if weights[i] < start and weights[i] not in moved]
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


def _products_in(graph: fx.Graph) -> dict[fx.Node, frozenset[fx.Node]]:
    """The products that each value is made of, back to what was waited for."""
    found: dict[fx.Node, frozenset[fx.Node]] = {}
    for node in graph.nodes:
        if node.op != "call_function" or node.target is WAIT:
            found[node] = frozenset()
        elif packet(node) in PRODUCTS:
            found[node] = frozenset([node])
        else:
            sets = {found[one] for one in node.all_input_nodes}
            found[node] = next(iter(sets)) if len(sets) == 1 else frozenset().union(*sets)
    return found


def _base(node: fx.Node) -> fx.Node:
    """What a node is a view of."""
    while is_view(node) and len(node.all_input_nodes) == 1:
        node = node.all_input_nodes[0]
    return node


def _until(product: fx.Node, start: fx.Node) -> set[fx.Node]:
    """A product and all that follows of it before `start`."""
    return {*reached([product], lambda node: [user for user in node.users if user < start])}
