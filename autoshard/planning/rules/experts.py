"""A mixture of experts as one operator: which part of it a rank of the axis computes.

    tokens split       x S(0), stacks R -> S(0)      weights are gathered
    both split         x S(0), stacks S(0) -> S(0)   rows travel to their experts and back
    experts split      x R, stacks S(0) -> P         whole experts, chosen tokens only
    each expert split  x R, stacks S(inner dim) -> P every expert, a share of its inner dim

Rows of choices travel by all-to-alls inside of the operator, as many as experts are chosen: the
plan prices even loads. What brings x to R and takes P on is the business of the edges: gathered
tokens and a reduce-scatter where the tokens are split around the mixture, an all-reduce where they
are not.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from autoshard.planning.expert_columns import inner_split
from autoshard.planning.mixtures import exchanged, not_of_zero
from autoshard.planning.rules.call import OpCall, differentiable
from autoshard.planning.sizes import count
from autoshard.planning.strategy import ImplCollective, Strategy
from autoshard.runtime.collectives import P, S
from autoshard.runtime.operators import (
    Bound,
    exchanged_experts,
    owned_experts,
    parse,
    split_experts,
)


def mixture(call: OpCall) -> Iterator[Strategy]:
    """autoshard::experts."""
    yield from _tokens(call)
    if bad := not_of_zero(call["body"]):
        call.decline(f"{call.op}: experts run {bad}, which may not be finite at zero")
    else:
        yield from _exchanged_rows(call)
        yield from _whole_experts(call)
    yield from _inside(call)


def _tokens(call: OpCall) -> Iterator[Strategy]:
    x = call.tensor("x")
    assert x is not None
    if call.fits(x.shape[0], f"{call.op}: tokens"):
        yield call.strategy(dict.fromkeys(("x", "ids", "weights"), S(0)), S(0))


def _exchanged_rows(call: OpCall) -> Iterator[Strategy]:
    x, ids, weights = (call.tensor(name) for name in ("x", "ids", "weights"))
    assert x is not None and ids is not None and weights is not None
    stacks = call.tensors("stacks")
    experts = stacks[0].shape[0]
    fits = [
        call.fits(x.shape[0], f"{call.op}: tokens"),
        call.fits(experts, f"{call.op}: experts"),
    ]
    if not all(fits):
        return
    assert isinstance(experts, int)
    own = (count(ids.shape) // call.n, 1)  # of this rank's tokens, evenly
    traffic = exchanged(x, ids.new_empty(own), weights, experts, call.n)
    split = call.strategy(
        {**dict.fromkeys(("x", "ids", "weights"), S(0)), "stacks": [S(0)] * len(stacks)},
        S(0),
        Bound.of(exchanged_experts, experts=experts),
        traffic,
    )
    yield split._replace(waits=1)


def _whole_experts(call: OpCall) -> Iterator[Strategy]:
    stacks = call.tensors("stacks")
    experts = stacks[0].shape[0]
    if not call.fits(experts, f"{call.op}: experts"):
        return
    impl = Bound.of(owned_experts, experts=experts)
    yield call.strategy({"stacks": [S(0)] * len(stacks)}, P, impl)


def _inside(call: OpCall) -> Iterator[Strategy]:
    stacks = call.tensors("stacks")
    shapes = [tuple(stack.shape) for stack in stacks]
    if not all(isinstance(size, int) for shape in shapes for size in shape):
        return
    found = inner_split(parse(call["body"]), shapes, call.n, stacks[0].element_size())
    if isinstance(found, str):
        call.decline(f"{call.op}: inside of each expert: {found}")
        return
    impl = None
    if found.body.text() != call["body"] or found.packed:
        impl = Bound.of(split_experts, local_body=found.body.text(), packed=found.packed)
    moved = [_exchanged(stacks[i], call.n) for i, _, _ in found.packed]
    traffic = [each for each in moved]
    traffic += [
        each._replace(backward=True)
        for each, (i, _, _) in zip(moved, found.packed)
        if differentiable(stacks[i])
    ]
    yield call.strategy({"stacks": list(found.states)}, P, impl, traffic)


def _exchanged(stack: torch.Tensor, n: int) -> ImplCollective:
    """The exchange that gives a rank its share of both halves of a packed stack."""
    return ImplCollective("all_to_all", count(stack.shape) * stack.element_size() // n)
