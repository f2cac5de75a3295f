"""Tensors as functions of their indices: what a graph computes from sizes alone, in closed form.

A mask is a tree of comparisons of indices. Its values are found without computing any, from the
structure of the tree (index_values.py has the functions, index_rules.py the operators). So the
answer holds for every index, costs nothing for a million tokens, and holds for symbolic sizes.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autoshard.passes.lib.index_rules import RULES
from autoshard.passes.lib.index_values import (
    Affine,
    Elements,
    Indexed,
    Number,
    Piecewise,
    Value,
    broadcast,
    chosen,
    elements_of,
)
from autoshard.planning import packet

aten = torch.ops.aten

_SELECTIONS = (aten.where, aten.masked_fill)  # pointwise, without the tag


class NotIndexed(Exception):
    """A value that is no such function; the text says why, `node` where."""

    def __init__(self, node: fx.Node, reason: str) -> None:
        super().__init__(reason)
        self.node = node


class IndexFunctions:
    """The index functions of the nodes of one graph, found when asked for.

    assumed: those of placeholders, whose values only a call knows. Integers and booleans of a dim
    or two that are no function of their indices are `Elements` of themselves; `unknown` says why.
    """

    def __init__(self, assumed: Mapping[fx.Node, Value] | None = None) -> None:
        self._known: dict[fx.Node, Value | NotIndexed] = dict(assumed or {})
        self.unknown: dict[fx.Node, NotIndexed] = {}

    def of(self, node: fx.Node) -> Value:
        """The index function of a node's value. Raises NotIndexed."""
        todo = [node]
        while todo:
            last = todo[-1]
            missing = [n for n in last.all_input_nodes if n not in self._known]
            tensors = [n for n in missing if isinstance(n.meta.get("val"), torch.Tensor)]
            if last not in self._known and tensors:
                todo += tensors
                continue
            todo.pop()
            if last not in self._known:
                try:
                    self._known[last] = self._found(last)
                except NotIndexed as unknown:
                    self._known[last] = self._elements(last, unknown)
        found = self._known[node]
        if isinstance(found, NotIndexed):
            raise found
        return found

    def _elements(self, node: fx.Node, unknown: NotIndexed) -> Value | NotIndexed:
        val = node.meta.get("val")
        if not isinstance(val, torch.Tensor) or not 1 <= val.dim() <= 2:
            return unknown
        if val.dtype.is_floating_point or val.dtype.is_complex:
            return unknown
        before = [self.unknown[n] for n in node.all_input_nodes if n in self.unknown]
        self.unknown[node] = before[0] if before else unknown
        return elements_of(node)

    def _found(self, node: fx.Node) -> Value:
        val = node.meta.get("val")
        if not isinstance(val, torch.Tensor):
            raise NotIndexed(node, f"{_name(node)} makes no tensor")
        if node.op == "placeholder":
            raise NotIndexed(
                node, f"it depends on {input_name(node)}, whose values only a call knows"
            )
        args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), self._operand)
        found = None
        if (rule := RULES.get(node.target)) is not None:
            found = rule(val, *args, **kwargs)
        if found is None and _is_pointwise(node):
            found = _by_number(node, args, kwargs)
        if found is None:
            raise NotIndexed(node, f"{_name(node)} is no comparison of indices that is known")
        whole = val.dtype in (torch.int32, torch.int64)
        if isinstance(found, Affine) and not (found.constant or whole):
            raise NotIndexed(node, f"{_name(node)} makes {val.dtype} of positions")
        return found

    def _operand(self, node: fx.Node) -> Any:
        val = node.meta.get("val")
        if not isinstance(val, torch.Tensor):
            return val
        found = self._known[node]
        if isinstance(found, NotIndexed):
            raise found
        return Indexed(found, val)


def input_name(node: fx.Node) -> str:
    """A placeholder's name as its user knows it; Dynamo's is `l_attention_mask_`."""
    return str(node.target).removeprefix("l_").removesuffix("_")


def _name(node: fx.Node) -> str:
    return str(getattr(node.target, "_opname", node.target))


def _is_pointwise(node: fx.Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    tags = node.target.tags
    drawn = torch.Tag.nondeterministic_seeded in tags
    return packet(node) in _SELECTIONS or (torch.Tag.pointwise in tags and not drawn)


def _by_number(node: fx.Node, args: Any, kwargs: Any) -> Value | None:
    """A pointwise operator on numbers and on choices by the same conditions: on the numbers."""
    val = node.meta["val"]
    leaves = pytree.arg_tree_leaves(*args, **kwargs)
    if any(isinstance(leaf, torch.SymInt) for leaf in leaves):
        return None
    given = [leaf for leaf in leaves if isinstance(leaf, Indexed)]
    values = [chosen(broadcast(leaf, val), leaf.fake) for leaf in given]
    if any(isinstance(v, Elements) or (isinstance(v, Affine) and not v.constant) for v in values):
        return None
    choices = [v for v in values if isinstance(v, Piecewise)]
    if any(v.conditions != choices[0].conditions for v in choices):
        return None

    def result(holds: bool) -> Number:
        def number(leaf: Any) -> Any:
            if isinstance(leaf, torch.device):
                return torch.device("cpu")
            if not isinstance(leaf, Indexed):
                return leaf
            value = chosen(leaf.value, leaf.fake)
            if isinstance(value, Piecewise):
                found = value.yes if holds else value.no
            else:
                found = value.offset
            return torch.tensor(found, dtype=leaf.fake.dtype)

        target: Any = node.target
        known, named = pytree.tree_map(number, (args, kwargs))
        return torch.as_tensor(target(*known, **named)).to(val.dtype).item()  # type: ignore[no-any-return]

    if not choices:
        return Affine(result(True), (0,) * val.dim())
    yes, no = result(True), result(False)
    return Piecewise(choices[0].conditions, yes, no) if yes != no else Affine(yes, (0,) * val.dim())
