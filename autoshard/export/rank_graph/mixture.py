"""A mixture in the graph of a rank, as traced_model.py wrote it and the plan left it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autoshard.export.rank_graph.core_operators import POINTWISE
from autoshard.passes import permutation

aten = torch.ops.aten


@dataclass(frozen=True)
class Mixture:
    """The nodes of one mixture.

    result: [tokens, hidden], its sum over the experts. picked: bool[experts, tokens, k], of which
    expert of this rank each choice is. counted: like it, what each choice counts. out: what the
    experts say, [experts, tokens, hidden]. inside: the operators that make it, in order. x: the
    tokens.
    """

    result: fx.Node
    picked: fx.Node
    counted: fx.Node
    out: fx.Node
    inside: tuple[fx.Node, ...]
    x: fx.Node

    @property
    def experts(self) -> int:
        return int(self.picked.meta["val"].shape[0])

    @property
    def chosen(self) -> int:
        """The experts that a token chooses, of all ranks'."""
        return int(self.picked.meta["val"].shape[2])

    @property
    def products(self) -> list[fx.Node]:
        """The products of rows and experts' matrices."""
        return [node for node in self.inside if node.target is aten.matmul.default]

    @property
    def parameters(self) -> int:
        """Numbers in the matrices of one expert."""
        stacks = [node.args[1].meta["val"] for node in self.products]  # type: ignore[union-attr]
        return sum(math.prod(stack.shape[1:]) for stack in stacks)

    @property
    def widths(self) -> int:
        """Numbers that a row of one token is read and written as around the products."""
        stacks = [node.args[1].meta["val"] for node in self.products]  # type: ignore[union-attr]
        return sum(sum(stack.shape[1:]) for stack in stacks)


def mixtures(graph: fx.Graph) -> Iterator[Mixture]:
    """Those whose experts' rows are computed without a collective in between."""
    for node in list(graph.find_nodes(op="call_function", target=aten.sum.dim_IntList)):
        found = _read(node)
        if found is not None:
            yield found


def _read(result: fx.Node) -> Mixture | None:
    product: Any = result.args[0]
    if list(result.args[1]) != [0] or len(result.args) > 2 or result.kwargs:  # type: ignore[arg-type]
        return None
    if product.target is not aten.mul.Tensor:
        return None
    said, share = product.args
    if not _calls(said, aten.where.self) or not _calls(share, aten.sum.dim_IntList):
        return None
    chose, out, _ = said.args
    counted = share.args[0]
    if not _calls(chose, aten.any.dim) or not _calls(counted, aten.where.self):
        return None
    picked = counted.args[0]
    if chose.args[0] is not picked or not _calls(picked, aten.eq.Tensor):
        return None
    shape = picked.meta["val"].shape
    if len(shape) != 3 or out.meta["val"].dim() != 3:
        return None
    inside: dict[fx.Node, None] = {}
    x = _follow(out, shape[0], inside)
    users = {user for node in inside for user in node.users}
    if x is None or users - inside.keys() - {said}:
        return None
    return Mixture(result, picked, counted, out, tuple(sorted(inside)), x)


def _follow(out: fx.Node, experts: int, inside: dict[fx.Node, None]) -> fx.Node | None:
    """The tokens that the experts' rows are made of; None where they are made in another way."""
    x: fx.Node | None = None
    waiting = [out]
    while waiting:
        node = waiting.pop()
        if node in inside:
            continue
        inside[node] = None
        if node.target is aten.matmul.default:
            rows, stack = node.args
            if not is_of_experts(stack, experts):
                return None
            if _calls(rows, aten.unsqueeze.default) and rows.args[1] == 0:  # type: ignore[union-attr]
                if x not in (None, rows.args[0]):  # type: ignore[union-attr]
                    return None
                x = rows.args[0]  # type: ignore[union-attr, assignment]
                continue
            waiting.append(rows)  # type: ignore[arg-type]
        elif node.target in POINTWISE:
            for operand in node.all_input_nodes:
                if not _is_number(operand) and not is_of_experts(operand, experts):
                    waiting.append(operand)
        elif node.target is aten.slice.Tensor and node.args[1] in (2, -1):
            waiting.append(node.args[0])  # type: ignore[arg-type]
        else:
            return None
    return x


def is_of_experts(node: Any, experts: int) -> bool:
    """Whether it is made of one weight alone, whose first dim is that of the experts."""
    if not isinstance(node, fx.Node) or not isinstance(node.meta["val"], torch.Tensor):
        return False
    at = node
    while at.op != "placeholder":
        if not (keeps_experts(at) or is_column(at)):
            return False
        at = at.args[0]  # type: ignore[assignment]
    shape = at.meta["val"].shape
    return len(shape) > 1 and shape[0] == experts and all(isinstance(size, int) for size in shape)


def keeps_experts(node: fx.Node) -> bool:
    """Whether an operator leaves the first dim of a stack of matrices where it is."""
    order = permutation(node)
    return node.target is aten._to_copy.default if order is None else order[0] == 0


def is_column(node: fx.Node) -> bool:
    """Whether an operator makes a stack of vectors one of matrices of one row."""
    return node.target is aten.unsqueeze.default and node.args[1] in (1, -2)


def _is_number(node: fx.Node) -> bool:
    return getattr(node.meta["val"], "shape", ()) == ()


def _calls(node: Any, target: Callable[..., Any]) -> bool:
    return isinstance(node, fx.Node) and node.target is target
