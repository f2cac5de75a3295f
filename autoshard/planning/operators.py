"""Sets of operators by what the cost model, the estimates and the passes ask about them.

The entries are packets (every overload of an operator), so that one set serves the serial graph
and the graphs AOTAutograd makes; `packet(node)` is what to look up.
"""

import functools
import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx

from autoshard.runtime import randomness
from autoshard.runtime.graph_meta import N_OUTPUTS
from autoshard.runtime.masked_attention import MASKED_ATTENTION
from autoshard.runtime.operators import FLOAT8_LINEAR

aten = torch.ops.aten

ADDED_PRODUCTS = frozenset({aten.addmm, aten.baddbmm, aten.addmv})
"""Matrix products whose first operand is a term that is added to the product of the next two."""

CONVOLUTIONS = frozenset(
    {
        *(aten.conv1d, aten.conv2d, aten.conv3d, aten.convolution, aten._convolution),
        *(aten.conv_transpose1d, aten.conv_transpose2d, aten.conv_transpose3d),
    }
)

PRODUCTS = frozenset(
    {
        *(aten.linear, aten.mm, aten.bmm, aten.matmul, aten.mv),
        *(aten._grouped_mm, aten._scaled_mm, aten._scaled_grouped_mm),
        FLOAT8_LINEAR.overloadpacket,
        *ADDED_PRODUCTS,
        *CONVOLUTIONS,
    }
)
"""Matrix products and convolutions: a kernel each, whose time is arithmetic."""

ATTENTION = frozenset(
    {
        aten.scaled_dot_product_attention,
        randomness.ATTENTION,
        MASKED_ATTENTION.overloadpacket,
    }
)
"""Attention as one operator: the scores are never in memory."""

LOOKUPS = frozenset({aten.embedding, aten.index, aten.index_select, aten.gather, aten.take})
"""Operators that read of their first operand, the table, only about what they return."""

INDEX_DERIVATIVES = LOOKUPS | {
    *(aten.where, aten.masked_fill, aten.scatter, aten.scatter_add, aten.index_add),
}
"""Operators whose derivative needs only their indices or masks, no value with a gradient."""

LOSSES = frozenset({aten.cross_entropy_loss, aten.nll_loss, aten.nll_loss_nd})
"""Losses of class indices over a table of scores."""

RESHAPES = frozenset({aten.reshape, aten.view})
"""Views that keep the order of the elements in memory."""

UNFUSED = LOOKUPS | LOSSES | {aten.sort, aten.topk, aten.index_put}
"""Operators, besides matrix products, that a compiler does not join to their neighbours."""


def packet(node: fx.Node) -> Any:
    """The operator a node calls, whatever the overload; None for anything else."""
    return getattr(node.target, "overloadpacket", None)


def target_name(node: fx.Node) -> str:
    """What a node calls, by a name that is the same in every process."""
    ordinary = isinstance(node.target, (str, torch._ops.OpOverload))
    return str(node.target) if ordinary else str(getattr(node.target, "__name__", node.target))


def reached(
    starts: Iterable[fx.Node], step: Callable[[fx.Node], Iterable[fx.Node]]
) -> dict[fx.Node, None]:
    """The starts, and every node that steps from them lead to."""
    found = dict.fromkeys(starts)
    todo = list(found)
    while todo:
        new = [node for node in step(todo.pop()) if node not in found]
        found.update(dict.fromkeys(new))
        todo += new
    return found


def inputs_of(node: fx.Node) -> list[fx.Node]:
    """The placeholders that a value is made of, in the order of the graph."""
    made_of = reached([node], lambda one: one.all_input_nodes)
    return [one for one in node.graph.find_nodes(op="placeholder") if one in made_of]


def arguments(node: fx.Node) -> dict[str, Any]:
    """The arguments of an operator by name, those that are left out with their defaults."""
    names = node.target._schema.arguments  # type: ignore[union-attr]
    given = {a.name: a.default_value for a in names if a.has_default_value()}
    return {**given, **dict(zip((a.name for a in names), node.args)), **node.kwargs}


def is_causal(node: fx.Node) -> bool:
    """Whether a node is attention that skips the keys after each query's own."""
    if packet(node) not in ATTENTION:
        return False
    return node.target is MASKED_ATTENTION or bool(arguments(node).get("is_causal"))


def is_view(node: fx.Node) -> bool:
    """Whether an operator may return another name for its operand's memory, by its schema."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target.is_view


def view_chain(node: Any) -> list[Any]:
    """A value, and what it is a view or an element of, down to what has made the memory."""
    found = [node]
    others = operator.getitem, aten._unsafe_view.default
    while isinstance(node, fx.Node) and (node.target in others or is_view(node)):
        node = node.args[0]
        found.append(node)
    return found


def views_among(gm: fx.GraphModule) -> list[tuple[int, int, Callable[[Any], Any]]]:
    """The results of the user's that are views of another one: the positions of both, and what
    makes the view. Positions after the user's results are those of inputs that the graph writes."""
    results: Any = gm.graph.output_node().args[0]
    places = {node: i for i, node in enumerate(results) if isinstance(node, fx.Node)}
    found: list[tuple[int, int, Callable[[Any], Any]]] = []
    for i, node in enumerate(results[: gm.meta[N_OUTPUTS]]):
        views = view_chain(node)
        others = [at for at, view in enumerate(views) if places.get(view, i) != i]
        if others:  # of the last, what has the memory of all the others
            made = functools.partial(_viewed, views[: others[-1]][::-1])
            found.append((places[views[others[-1]]], i, made))
    return found


def _viewed(views: Iterable[fx.Node], whole: Any) -> Any:
    """The view of a tensor; None where a size of it is another value of the graph."""
    for view in views:
        if len(view.all_input_nodes) != 1:
            return None
        whole = view.target(whole, *view.args[1:], **view.kwargs)  # type: ignore[operator]
    return whole


def unflattened(node: Any, dims: int) -> fx.Node | None:
    """The value of so many dims of which `node` has the first two as one; None if it is none."""
    if not isinstance(node, fx.Node) or node.target is not aten.reshape.default:
        return None
    source: fx.Node = node.args[0]  # type: ignore[assignment]
    before, after = source.meta["val"].shape, node.meta["val"].shape
    flat = len(before) == dims and len(after) == dims - 1 and before[2:] == after[1:]
    return source if flat else None


def is_handed_on(result: fx.Node) -> bool:
    """Whether an output, where there are no gradients, is rather for the next call than to be read:
    what the graph itself goes on to use, a part or a copy of it. Those are the keys and values of a
    cache, cropped to a window where attention has one, and a recurrent state."""
    return _used_further(result) is not None


def cached(result: fx.Node) -> fx.Node | None:
    """The keys or values of attention that an output is, or is a part of; None: it is none. With
    gradients too nobody but a later call reads them."""
    made = _used_further(result)
    return made if made is not None and _is_key_or_value(made) else None


def _used_further(result: fx.Node) -> fx.Node | None:
    """The value that the graph goes on to use of which an output is a view or a copy."""
    view: fx.Node | None = None
    while True:
        if any(user.op != "output" and user is not view for user in result.users):
            return result
        same = result.op == "call_function" and (is_view(result) or packet(result) is aten.clone)
        source = result.args[0] if same else None
        if not isinstance(source, fx.Node) or source.op == "placeholder":
            return None
        view, result = result, source


def _is_key_or_value(node: fx.Node) -> bool:
    for user in node.users:
        if packet(user) in ATTENTION and node in user.args[1:3]:
            return True
        if (is_view(user) or packet(user) is aten.clone) and _is_key_or_value(user):
            return True  # heads that are repeated
    return False
