"""A strategy: the states in which one operator may consume and produce its tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autoshard.runtime.collectives import Axis, State, shard_dim

_NESTED = frozenset({tuple, list, fx.immutable_collections.immutable_list, Axis})
_FLAT = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device})


class ImplCollective(NamedTuple):
    """A collective that a strategy's own implementation runs; `nbytes` as in cost/model.py.

    axis, n: of an operator that runs over another axis than the planned one, that axis and its
    size; "" and 0: the planned one. copies: of rows that travel to experts, how many a token has.
    """

    op: str
    nbytes: int
    backward: bool = False
    axis: str = ""
    n: int = 0
    copies: int = 0


class Strategy(NamedTuple):
    """A way to run an operator on one mesh axis: the states of its operands and result.

    inputs: the state of each operand, in the order of `operands(node)`.
    output: the state of the result; a tuple (one state an element) where the node's value is a
        tuple or list of tensors.
    impl: what runs instead of the operator, where running the operator itself on the shards is
        not enough (a vocab-parallel embedding). Called as impl(*args, **kwargs, axis=Axis), with
        the node's own arguments, tensors in their local form.
    traffic: the collectives inside `impl`, so that the planner can price them.
    share: the part of the operator's arithmetic that the busiest of n ranks does, times n: 1 where
        all do as much.
    waits: how often the host waits for the device inside `impl`, to read sizes that depend on
        values; what an export writes down never does.
    on_ep: of a mixture of experts whose stacks may stay where they are on an axis ep, what travels
        there: "rows" or "weights"; "" of anything else.
    """

    inputs: tuple[State, ...]
    output: State | tuple[State, ...]
    impl: Callable[..., Any] | None = None
    traffic: tuple[ImplCollective, ...] = ()
    share: float = 1.0
    waits: int = 0
    on_ep: str = ""

    @property
    def outputs(self) -> tuple[State, ...]:
        """The states of the results, of which there may be one."""
        return (self.output,) if isinstance(self.output, str) else self.output


def parts_of(state: State, n: int) -> int:
    """Of how many parts of a value a rank of an axis of `n` holds one."""
    return 1 if shard_dim(state) is None else n


def value(node: fx.Node) -> Any:
    """The fake value (a tensor, a tuple of tensors, a SymInt) the node produces."""
    return node.meta.get("val")


def results(node: fx.Node) -> list[Any]:
    """The fake values the node produces, of which there may be one."""
    made = value(node)
    return list(made) if isinstance(made, (tuple, list)) else [made]


def in_state(node: fx.Node, state: State) -> State | tuple[State, ...]:
    """The output of a strategy with which every result of the node is in one state."""
    made = value(node)
    return (state,) * len(made) if isinstance(made, (tuple, list)) else state


def operands(node: fx.Node) -> list[fx.Node]:
    """Tensor-valued arguments, every appearance, in the order of args then kwargs."""
    leaves = _leaves((*node.args, *node.kwargs.values()))
    return [leaf for leaf in leaves if isinstance(value(leaf), torch.Tensor)]


def _leaves(arguments: Iterable[Any]) -> Iterator[fx.Node]:
    """The nodes among arguments, in the order of pytree, of which flat ones need nothing."""
    for one in arguments:
        if isinstance(one, fx.Node):
            yield one
        elif type(one) in _NESTED:
            yield from _leaves(one)
        elif type(one) not in _FLAT:
            yield from (leaf for leaf in pytree.tree_leaves(one) if isinstance(leaf, fx.Node))
