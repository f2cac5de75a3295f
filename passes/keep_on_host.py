"""Values that a plan keeps on the host leave the device in forward and return in backward.

    forward                       after                         backward, after
    %x = mm(...)                  %x = mm(...)                  %g = reload(%x_kept, cuda)
    %y = relu(%x)                 %h = offload(%x)              ...
    ...                           %y = relu(%x)                 %x = wait_transfer(%g, %x_kept)
    return (%out, %x)             ...                           %d = mm(%x, ...)
                                  %x_kept = wait_transfer(%h, %x)
                                  return (%out, %x_kept)

Both graphs change together, as AOTAutograd has cut them. A copy is waited for
when as many bytes as the largest value has are on their way behind it, and fetched as many bytes
ahead of its use: that is what the device holds of them.

Not done: what shares its memory with a result or with another kept value stays on the device, and
so does what is not dense; other values wait for no prediction of time.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from autoshard.passes.base import emit, replace
from autoshard.passes.lib.layouts import memory_order
from autoshard.planning import tensor_bytes
from autoshard.runtime import compat
from autoshard.runtime.graph_meta import HOST
from autoshard.runtime.host_memory import OFFLOAD, RELOAD, WAIT_TRANSFER

_NAME = "keep_on_host"


def keep_on_host(forward: fx.GraphModule, backward: fx.GraphModule, results: int) -> int:
    """Send what is tagged with `HOST` to the host, in place, and say how much of it was sent.

    results: the outputs of the forward that are not kept for backward.
    """
    output = forward.graph.output_node()
    outputs: Any = output.args[0]
    inputs = {node.name: node for node in backward.graph.find_nodes(op="placeholder")}
    chosen = [node for node in _movable(outputs, results) if inputs[node.name].users]
    if not chosen:
        return 0
    kept = _send(forward.graph, chosen)
    output.args = (type(outputs)(kept.get(node, node) for node in outputs),)
    _fetch(backward.graph, {inputs[node.name]: kept[node] for node in chosen})
    for gm in (forward, backward):
        gm.graph.lint()
        gm.recompile()
    return len(chosen)


def _movable(outputs: Sequence[Any], results: int) -> list[fx.Node]:
    """The kept values that leave the device, in the order of the graph."""
    nodes = [n for n in dict.fromkeys(outputs) if isinstance(n, fx.Node)]
    nodes = [n for n in nodes if isinstance(n.meta.get("val"), torch.Tensor)]
    owners = Counter(compat.memory_of(node) for node in nodes)
    found = {
        node
        for node in nodes
        if node.meta.get("custom", {}).get(HOST)
        and node not in outputs[:results]
        and compat.memory_of(node).op == "call_function"
        and owners[compat.memory_of(node)] == 1
        and memory_order(node.meta["val"]) is not None
    }
    return [node for node in next(iter(found)).graph.nodes if node in found] if found else []


def _send(graph: fx.Graph, chosen: Sequence[fx.Node]) -> dict[fx.Node, fx.Node]:
    """What is kept in the place of each value: its copy, which is waited for before as many bytes
    follow as may be on their way, but not before the last use."""
    nodes = list(graph.nodes)
    place = {node: i for i, node in enumerate(nodes)}
    end = len(nodes) - 1
    kept: dict[fx.Node, fx.Node] = {}
    for i, node in enumerate(chosen):
        j = _last_ahead(chosen, i) + 1
        last = max((place[user] for user in node.users if place[user] < end), default=0)
        anchor = nodes[max(last, (place[chosen[j]] if j < len(chosen) else end) - 1)]
        with graph.inserting_after(node):
            sent = emit(graph, node, OFFLOAD, (node,), provenance=_NAME)
        with graph.inserting_after(sent if anchor is node else anchor):
            kept[node] = _wait(graph, node, (sent, node), f"{node.name}_kept")
    return kept


def _fetch(graph: fx.Graph, chosen: Mapping[fx.Node, fx.Node]) -> None:
    """Fetch each input that is on the host now, in the order of their first uses. chosen: what is
    kept in the place of each."""
    nodes = list(graph.nodes)
    place = {node: i for i, node in enumerate(nodes)}
    first = {node: min(node.users, key=place.__getitem__) for node in chosen}
    order = sorted(chosen, key=lambda node: place[first[node]])
    uses = [place[first[node]] for node in order]
    # the first is fetched as far ahead of its use as the second is used behind it
    distance = uses[1] - uses[0] if len(uses) > 1 else 0
    begin = next(i for i, node in enumerate(nodes) if node.op != "placeholder")
    starts = [max(begin, uses[0] - distance)] + [0] * (len(order) - 1)
    for i in reversed(range(len(order))):
        for k in range(i + 1, _last_ahead(order, i) + 1):
            starts[k] = uses[i]
    for node, at in zip(order, starts):
        before = nodes[at]
        with graph.inserting_before(node):
            given = graph.placeholder(chosen[node].name)
        given.meta = {**node.meta, "val": chosen[node].meta["val"]}
        with graph.inserting_before(before):
            device = node.meta["val"].device
            moved = emit(graph, node, RELOAD, (given, device), provenance=_NAME)
        with graph.inserting_before(first[node]):
            back = _wait(graph, node, (moved, given), f"{node.name}_back")
        replace(node, back)


def _last_ahead(nodes: Sequence[fx.Node], i: int) -> int:
    """The last of the values after number i that fit beside it into what may be on its way."""
    sizes = [tensor_bytes(node.meta["val"]) for node in nodes]
    limit, total = max(sizes), 0
    while i + 1 < len(nodes) and (total := total + sizes[i + 1]) <= limit:
        i += 1
    return i


def _wait(graph: fx.Graph, like: fx.Node, args: tuple[fx.Node, ...], name: str) -> fx.Node:
    return emit(graph, like, WAIT_TRANSFER, args, provenance=_NAME, name=name)
