"""Sums of gradients that are written where the gradients are made.

    before                         after
    %0 = mm(%a, %b)                %0 = mm(%a, %b)
    %1 = mm(%c, %d)                %1 = add_(%sum, %0)
    %2 = add(%sum, %0)             %2 = mm(%c, %d)
    %3 = copy_(%sum, %2)

AOTAutograd makes a graph without side effects, and writes to its inputs at the end: until then each
gradient is there, and its sum once more.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autoshard.planning import is_view

aten = torch.ops.aten


def add_at_once(gm: fx.GraphModule, backward: bool = True) -> None:
    """Add to sums among the graph's inputs right after what is added is made, in place.

    Only sums that nothing else reads; for both of AOTAutograd's graphs, and those without autograd.
    """
    graph = gm.graph
    for write in graph.find_nodes(op="call_function", target=aten.copy_.default):
        total, source = write.args[:2]
        add: Any = source.args[0] if source.target is aten._to_copy.default else source
        if total.op != "placeholder" or add.target is not aten.add.Tensor or write.users:
            continue
        gradient, between = add.args[1], [add, *([source] if source is not add else [])]
        alone = set(total.users) == {add, write} and all(len(n.users) == 1 for n in between)
        if add.args[0] is not total or add.kwargs or not alone:
            continue
        with graph.inserting_after(behind(gradient)):
            at_once = graph.call_function(aten.add_.Tensor, (total, gradient))
        at_once.meta = {**add.meta, "val": total.meta["val"]}
        for node in (write, *reversed(between)):
            graph.erase_node(node)
    gm.recompile()


def behind(gradient: fx.Node) -> fx.Node:
    """The node after which a gradient is read first. It is moved, where it is a view, to what it is
    a view of."""
    views = [gradient]
    while is_view(views[-1]) and len(views[-1].all_input_nodes) == 1:
        views.append(views[-1].all_input_nodes[0])
    last = views.pop()
    if last.op == "placeholder":
        last = last.graph.find_nodes(op="placeholder")[-1]
    for view in reversed(views):
        last.append(view)
        last = view
    return last
