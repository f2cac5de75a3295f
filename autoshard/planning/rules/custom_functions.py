"""A custom autograd function is sharded as its own two bodies are.

Dynamo leaves `Function.apply` in its graph as one operator with a forward and a backward body. No
table knows such a function; its bodies are made of operators that rules know. A shard of a dim may
enter where each operator of both bodies, on its own, takes the states that the one before made:
without communication, without an implementation of autoshard's, and without a size written into an
argument. What the backward makes for an operand decides its state: the shard that came in, or,
of one that is whole, parts that add up (R) or the same on every rank (I).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from autoshard.planning.rules.views import size_entry
from autoshard.planning.strategy import Strategy, operands, value
from autoshard.planning.values import producer, state_of
from autoshard.runtime.collectives import I, P, R, S, State, shard_dim
from autoshard.runtime.compat import FakeTensor

Strategies = Callable[[fx.Node, int], tuple[list[Strategy], list[str]]]

CUSTOM_FUNCTION = torch.ops.higher_order.autograd_function_apply
_BODIES = "traced_bodies"


def custom_function(node: fx.Node, n: int, known: Strategies) -> tuple[list[Strategy], list[str]]:
    """The strategies of a call of `autograd_function_apply` that shard a dim, and the reasons
    against others. known: the strategies of the operators in its bodies."""
    tensors = operands(node)
    if node.meta.get(_BODIES) is None:
        node.meta[_BODIES] = _traced(node, tensors)
    bodies = node.meta[_BODIES]
    if isinstance(bodies, str):
        return [], [bodies]
    offered, reasons = [], []
    for states in _entrances([value(each) for each in tensors]):
        try:
            offered.append(_strategy(node, bodies, states, n, known))
        except _NotOnShards as why:
            reasons.append(str(why))
    return offered, list(dict.fromkeys(reasons))


class _NotOnShards(Exception):
    """Why a body does not run on shards."""


def _traced(node: fx.Node, tensors: Sequence[fx.Node]) -> tuple[fx.GraphModule, ...] | str:
    """Both bodies as graphs of aten's operators, or why there are none."""
    gm = node.graph.owning_module
    given = [value(each) for each in tensors]
    fake = next((each.fake_mode for each in given if isinstance(each, FakeTensor)), None)
    if gm is None or fake is None or len(node.args) != 2 + len(tensors):
        return f"{node.target} takes more than tensors"
    forward, backward = (gm.get_submodule(str(body.target)) for body in node.args[:2])  # type: ignore[union-attr]
    try:
        with fake, torch.no_grad():
            first = make_fx(forward, pre_dispatch=True)(*(each.detach() for each in given))
            returned: Any = first.graph.output_node().args[0]
            made, saved = (_values(each) for each in returned)
            gradients = [torch.empty_like(each) for each in made]
            second = make_fx(backward, pre_dispatch=True)(*gradients, *saved)
    except Exception as error:  # a body of another form: a count of arguments, values it reads
        return f"its bodies are not traced again ({type(error).__name__})"
    return first, second


def _values(nodes: Any) -> list[Any]:
    """The values of the nodes that a body returns."""
    return [value(each) if isinstance(each, fx.Node) else each for each in nodes]


def _entrances(tensors: Sequence[torch.Tensor]) -> Iterator[list[State]]:
    """States of the operands: a dim of the largest sharded, and what lies along it."""
    rank = max(each.dim() for each in tensors)
    largest = next(each for each in tensors if each.dim() == rank)
    for dim in range(rank):
        yield [
            S(dim - rank + each.dim())
            if rank - each.dim() <= dim and each.shape[dim - rank] == largest.shape[dim] != 1
            else I
            for each in tensors
        ]


def _strategy(
    node: fx.Node,
    bodies: Sequence[fx.GraphModule],
    states: Sequence[State],
    n: int,
    known: Strategies,
) -> Strategy:
    forward, backward = bodies
    made, saved = _walk(forward, states, n, known)
    if any(state == P for state in made):
        raise _NotOnShards("a result would be a part of a sum")
    if not any(shard_dim(state) is not None for state in made):
        raise _NotOnShards("no result is a shard")
    gradients = _walk(backward, [*made, *saved], n, known)
    inputs = [
        _operand(state, gradient) for state, gradient in zip(states, gradients[0], strict=True)
    ]
    many = isinstance(value(node), tuple | list)
    return Strategy(tuple(inputs), tuple(made) if many else made[0])


def _operand(state: State, gradient: State | None) -> State:
    """The state of an operand whose gradient is made in that one."""
    if gradient is None or gradient == state:
        return state
    if state == I and gradient == P:
        return R
    raise _NotOnShards(f"the gradient of an operand that is {state} is made as {gradient}")


def _walk(
    body: fx.GraphModule, given: Sequence[State], n: int, known: Strategies
) -> list[list[Any]]:
    """The states of what a body returns, in groups where it returns groups."""
    states: dict[fx.Node, Strategy] = {}

    entering = iter(given)
    for node in body.graph.nodes:
        if node.op == "placeholder":
            states[node] = Strategy((), next(entering))
        elif node.op == "get_attr":
            states[node] = Strategy((), I)
        elif node.op == "call_function" and producer(node)[0] is node:
            if operands(node) or isinstance(node.target, torch._ops.OpOverload):
                states[node] = _operator(
                    node, {each: state_of(each, states) for each in operands(node)}, n, known
                )
    returned: Any = body.graph.output_node().args[0]
    groups = returned if isinstance(returned[0], tuple | list) else [returned]
    return [
        [state_of(each, states) if isinstance(each, fx.Node) else None for each in group]
        for group in groups
    ]


def _operator(node: fx.Node, have: Mapping[fx.Node, State], n: int, known: Strategies) -> Strategy:
    whole = all(state == I for state in have.values())
    for strategy in known(node, n)[0]:
        fits = all(
            state == want or (state == I and want == R)
            for state, want in zip((have[each] for each in operands(node)), strategy.inputs)
        )
        dims = [shard_dim(state) for state in strategy.outputs]
        sized = any(dim is not None and size_entry(node, dim) for dim in dims)
        if fits and strategy.impl is None and not sized and (whole or R not in strategy.outputs):
            return strategy
    states = ", ".join(have.values())
    raise _NotOnShards(f"no rule says that {node.target} of its body takes {states}")
