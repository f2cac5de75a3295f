"""What backward reads of an input or of a result is kept as that, of which it makes its view anew.

    forward                       after                         backward, after
    %y = mm(%x, %w)               %y = mm(%x, %w)               %t = permute(%w, [1, 0])
    %t = permute(%w, [1, 0])      return (%y, %w)               %d = mm(%g, %t)
    return (%y, %t)

The partitioner keeps either, which are of one size. Autograd raises where a kept tensor is written
before the backward, and tells that by the tensor's version, which a view shares with its base. The
view that Inductor returns has a version of its own: a buffer that was written in between went into
gradients without a word.

Not done: an input that the graph writes itself; a result that is the view.
"""

import operator
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from autoshard.runtime import compat


def save_bases(forward: fx.GraphModule, backward: fx.GraphModule, results: int) -> int:
    """Keep inputs and results instead of their views, in place, and say of how many views.

    results: the outputs of the forward that are not kept for backward.
    """
    output = forward.graph.output_node()
    outputs: Any = output.args[0]
    kept = list(outputs[results:])
    bases = {node for node in outputs[:results] if isinstance(node, fx.Node)}
    views = {view: chain for view in dict.fromkeys(kept) if (chain := _chain(view, bases))}
    if not views:
        return 0
    graph = backward.graph
    at, gone = {node: i for i, node in enumerate(kept)}, set[fx.Node]()
    given = {node.name: node for node in graph.find_nodes(op="placeholder")}
    order = {node: i for i, node in enumerate(graph.nodes)}
    for view, chain in views.items():
        for size in {size: None for one in chain for size in one.all_input_nodes[1:]}:
            if size.name not in given:  # sizes are the last of what is kept
                last = next(one for one in reversed(kept) if one not in gone)
                with graph.inserting_after(given[last.name]):
                    given[size.name] = _placeholder(graph, size)
                at[size] = len(kept)
                kept.append(size)
        source, place = chain[0].all_input_nodes[0], given[view.name]
        if source in at:
            gone.add(view)
        else:
            with graph.inserting_before(place):
                given[source.name] = _placeholder(graph, source)
            at[source] = at[view]
            kept[at[view]] = source
        if place.users:  # where it is read first: layers that were equal still are
            first = min(place.users, key=order.__getitem__)
            place.replace_all_uses_with(_anew(chain, first, given))
        graph.erase_node(place)
    output.args = ((*outputs[:results], *(one for one in kept if one not in gone)),)
    for one in reversed(list(dict.fromkeys(one for chain in views.values() for one in chain))):
        if not one.users:
            forward.graph.erase_node(one)
    for gm in (forward, backward):
        gm.graph.lint()
        gm.recompile()
    return len(views)


def _anew(chain: Sequence[fx.Node], first: fx.Node, given: Mapping[str, fx.Node]) -> fx.Node:
    """The last of `chain`, made before `first` of what is given by name."""
    known, graph = dict(given), first.graph
    with graph.inserting_before(first):
        for one in chain:
            known[one.name] = graph.node_copy(one, lambda node: known[node.name])
    return known[chain[-1].name]


def _placeholder(graph: fx.Graph, like: fx.Node) -> fx.Node:
    node = graph.placeholder(like.name)
    node.meta = dict(like.meta)
    return node


def _chain(view: Any, results: Collection[fx.Node]) -> list[fx.Node]:
    """The views from an input or a result to a kept tensor, in their order; none where it is no
    such view, or a result itself."""
    if not isinstance(view, fx.Node) or not isinstance(view.meta.get("val"), torch.Tensor):
        return []
    chain: list[fx.Node] = []
    while view not in results and (source := compat.viewed(view)) is not None:
        # a part of several views of a tensor is read by getitem
        chain += [view, *view.all_input_nodes[: view.target is operator.getitem]]
        view = source
    written = any(view in compat.written_by(n.target, n.args, n.kwargs) for n in view.users)
    kept = view.op == "placeholder" or view in results
    return chain[::-1] if kept and not written else []
