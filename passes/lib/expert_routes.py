"""The routing of a mixture of experts, read backwards from one of its products."""

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autoshard.planning import arguments
from autoshard.runtime.operators import PRODUCTS

aten = torch.ops.aten

_SORTS = (aten.sort.default, aten.sort.stable)


class NotExperts(Exception):
    """Products of experts that are not a mixture as the matcher knows it; the text says why."""


@dataclass(frozen=True)
class Route:
    """Where tokens go. All but `ids` and the two numbers are nodes of one sort.

    ids: [tokens, k] numbers of experts. order: for each row, sorted by expert, the place of its
    choice among all. owner: its expert, by one or more nodes. offs: where each expert's rows end.
    """

    ids: fx.Node
    k: int
    experts: int
    order: fx.Node
    owners: tuple[fx.Node, ...]
    offs: fx.Node


def product_name(node: fx.Node) -> str:
    """The name of a grouped product of rows with a stack of matrices; "" for anything else."""
    if node.op != "call_function" or str(node.target) not in PRODUCTS:
        return ""
    operands: Any = node.args[:2]
    dims = [argument.meta["val"].dim() for argument in operands]
    ends = arguments(node)["offs"]
    return str(node.target) if dims == [2, 3] and isinstance(ends, fx.Node) else ""


def find_route(product: fx.Node) -> Route:
    """The routing that a grouped product follows. Raises NotExperts."""
    operands: Any = product.args
    offs = _node(arguments(product)["offs"])
    stack = operands[1].meta["val"]
    if not isinstance(experts := stack.shape[0], int):
        raise NotExperts("the number of experts is symbolic")
    owner = _counted(offs, experts)
    sort: Any = owner.args[0]
    if owner.target is not operator.getitem or sort.target not in _SORTS:
        raise NotExperts("what counts the rows of each expert is not a sorted list of experts")
    if owner.args[1] != 0 or not _ascends(sort):
        raise NotExperts("rows are not sorted by expert upwards")
    flat = _node(sort.args[0])
    ids = _node(flat.args[0]) if flat.target is aten.reshape.default else flat
    shape = ids.meta["val"].shape
    if flat.meta["val"].dim() != 1 or len(shape) != 2 or not isinstance(shape[1], int):
        raise NotExperts(f"the experts of tokens are {list(shape)}, not [tokens, k] flattened")
    parts = {one.args[1]: one for one in sort.users if one.target is operator.getitem}
    if 1 not in parts:
        raise NotExperts("nothing follows the order of the sorted rows")
    return Route(ids, shape[1], experts, parts[1], (owner,), offs)


def _counted(offs: fx.Node, experts: int) -> fx.Node:
    """The sorted experts whose counts add up to `offs`."""
    total = _uncast(offs)
    if total.target is not aten.cumsum.default or total.args[1] not in (0, -1):
        raise NotExperts("the ends of the experts' rows are not a running sum of counts")
    counts = _uncast(_node(total.args[0]))
    if counts.target is not aten.histc.default:
        raise NotExperts("the rows of each expert are not counted by histc")
    given = arguments(counts)
    if (given["bins"], given["min"], given["max"]) != (experts, 0, experts - 1):
        raise NotExperts(f"histc does not count {experts} experts one by one")
    return _uncast(_node(given["self"]))


def is_token(node: Any, route: Route) -> bool:
    """Whether it is the token of each row: its place among all choices, divided by k."""
    names = (aten.floor_divide.default, aten.div.Tensor_mode)
    if not isinstance(node, fx.Node) or node.target not in names:
        return route.k == 1 and node is route.order
    rounded = node.kwargs.get("rounding_mode") in ("floor", "trunc", None)
    return rounded and node.args[0] is route.order and bool(node.args[1] == route.k)


def is_inverse(node: Any, route: Route) -> bool:
    """Whether it is the place of each choice among the sorted rows."""
    if not isinstance(node, fx.Node):
        return False
    if node.target is aten.argsort.default:
        return list(node.args) == [route.order] and not node.kwargs
    if node.target is operator.getitem:
        sort: Any = node.args[0]
        places_of = node.args[1] == 1 and sort.target in _SORTS
        return bool(places_of) and sort.args[0] is route.order and _ascends(sort)
    if node.target is not aten.index_put.default or len(node.args) > 3 or node.kwargs:
        return False
    places: Any = node.args[1]
    return list(places) == [route.order] and _counts_up(node.args[2])


def _counts_up(node: Any) -> bool:
    """Whether it is 0, 1, 2, ... for every row: of as many, the index of a whole permutation."""
    if not isinstance(node, fx.Node) or node.meta["val"].dim() != 1:
        return False
    if node.target is aten.arange.default:
        return True
    start: Any = node.args[0]
    ones = node.args[2:3] in ((), (1,))
    return node.target is aten.arange.start_step and bool(start == 0) and ones


def _ascends(sort: Any) -> bool:
    """Whether a sort of one dim goes upwards."""
    return not arguments(sort)["descending"]


def _uncast(node: fx.Node) -> fx.Node:
    while node.target is aten._to_copy.default:
        node = _node(node.args[0])
    return node


def _node(argument: Any) -> fx.Node:
    if not isinstance(argument, fx.Node):
        raise NotExperts("the ends of the experts' rows are not computed in the graph")
    return argument
