"""Dependencies that make Inductor keep the order which schedule_collectives chose.

    before                                        after
    %0 = all_reduce(%b, sum, dp)                  %0 = all_reduce(%b, sum, dp)
    %1 = mm(%g, %w)                               %1 = mm(%g, %w)         after %0
    %2 = mm(%1, %v)                               %2 = mm(%1, %v)
    %3 = wait(%0)                                 %3 = wait(%0)           after %2

Inductor orders kernels anew, for peak memory, and fuses kernels of distant layers (all norm
gradients of a model into one, at the end of backward). Both see only data: a collective then
starts late and is waited for at once, and nothing overlaps. What stands fixed here are the matrix
products around each collective: the first one between its start and its wait comes after the
start, the wait comes after the last one, and a start comes after the last one before it. So does
the making of a bucket: gradients are put into it one by one, before the next product (all at once,
each would be held twice until then), and parameters when the bucket starts, not when forward does.

Runs on Inductor's graph, after its pattern matching, which does not see through the dependencies.

Inductor's pass that reduces in place what nobody else reads does not see through the dependencies
either, and would copy each bucket of all-reduced gradients: `reduce_in_place` does it before.

Transfers to and from the host are held like collectives: the products between a copy's start and
its wait are those that it runs beside.

Rows that travel to their experts do so in an operator that Inductor does not know for a collective,
and so do activations in one with their products, and the sums of a loss by chunks: each comes after
the collective before it, and the next one after it, so that all ranks run them in one order.

Not done: products that Inductor lowers to loops (very small ones) are not held.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

from torch import fx

from autoshard.passes import ALL_REDUCE, COLLECTIVES, WAIT, aten, c10d, waits_of
from autoshard.planning import PRODUCTS, RESHAPES, packet
from autoshard.runtime.collectives import EXCHANGES, FUSED_PRODUCTS
from autoshard.runtime.host_memory import OFFLOAD, RELOAD, WAIT_TRANSFER
from autoshard.runtime.operators import CHUNKED_LOSS


def hold_order(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """Reduce buckets in place, and return the dependencies that Inductor is given."""
    reduce_in_place(graph)
    return order_dependencies(graph)


def reduce_in_place(graph: fx.Graph) -> None:
    """Let an all-reduce write to the bucket it reads, where only it reads that."""
    for node in graph.nodes:
        if node.target is not ALL_REDUCE or _bucket(node) is None:
            continue
        source: Any = node.args[0]
        while packet(source) in RESHAPES and len(source.users) == 1:
            source = source.args[0]
        if source.target is aten.cat.default and len(source.users) == 1:
            node.target = IN_PLACE


def order_dependencies(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """The nodes that each node must come after, besides those it reads, in the order of the graph.

    A collective with no product between its start and its wait needs none. A graph that is a region
    of another has waits for what started before it, and starts of what is waited for after it.
    """
    found: dict[fx.Node, list[fx.Node]] = {}
    nodes = list(graph.nodes)
    position = {node: i for i, node in enumerate(nodes)}
    products = [node if _is_product(node) else None for node in nodes]
    # the last product before each node and before the end, and the first one after each node
    before = [None, *accumulate(products, lambda last, one: one or last)]
    after = [None, *accumulate(products[::-1], lambda last, one: one or last)][-2::-1]
    previous: fx.Node | None = None
    for start in nodes:
        # Inductor keeps the order of collectives that it knows, and does not know these
        if start.target in (*COLLECTIVES, IN_PLACE, *_UNKNOWN):
            if previous is not None and {start.target, previous.target} & {*_UNKNOWN}:
                found.setdefault(start, []).append(previous)
            previous = start
        earlier = before[position[start]]
        if start.target is WAIT and start.all_input_nodes[0].op == "placeholder" and earlier:
            found.setdefault(start, []).append(earlier)  # it was started in another region
        if start.target not in (*COLLECTIVES, IN_PLACE, *TRANSFERS):
            continue
        waits = sorted(_waits(start), key=position.__getitem__)
        if not waits and start.target in TRANSFERS:
            continue  # backward waits for it
        end = position[waits[0]] if waits else len(nodes)  # waited for in another region
        first, final = after[position[start]], before[end]
        if first is None or final is None or position[first] > end:
            continue
        found.setdefault(first, []).append(start)
        for one in waits:
            found.setdefault(one, []).append(final)
        if earlier is not None:
            found.setdefault(start, []).append(earlier)
        bucket = _bucket(start)
        if bucket is None:
            continue
        pieces: Any = bucket.args[0]
        if earlier is not None and all(_unshaped(n).op == "placeholder" for n in pieces):
            found.setdefault(bucket, []).append(earlier)
        for piece in pieces:
            product = after[position[piece]]
            divided = piece.target is aten.div.Tensor
            if divided and product is not None and position[product] < end:
                found.setdefault(product, []).append(piece)
    return dict(sorted(found.items(), key=lambda item: position[item[0]]))


def _is_product(node: fx.Node) -> bool:
    return packet(node) in PRODUCTS or node.target in FUSED_PRODUCTS


def _waits(start: fx.Node) -> list[fx.Node]:
    if start.target in TRANSFERS:
        return [user for user in start.users if user.target is WAIT_TRANSFER]
    return waits_of(start)


def _bucket(start: fx.Node) -> fx.Node | None:
    """The concatenation that a collective moves."""
    source = _unshaped(start.args[0])
    return source if isinstance(source, fx.Node) and source.target is aten.cat.default else None


def _unshaped(node: Any) -> Any:
    """What a node is a view of."""
    while isinstance(node, fx.Node) and packet(node) in RESHAPES:
        node = node.args[0]
    return node


_UNKNOWN = (*EXCHANGES, *FUSED_PRODUCTS, CHUNKED_LOSS)
TRANSFERS = (OFFLOAD, RELOAD)
IN_PLACE = c10d.all_reduce_.default
