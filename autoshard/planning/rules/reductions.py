"""Operators that reduce a dim: over a sharded one they give a partial result, or communicate."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from autoshard.planning.rules.call import OpCall, differentiable
from autoshard.planning.rules.views import along, except_dims, reducing
from autoshard.planning.sizes import count, hint
from autoshard.planning.strategy import ImplCollective, Strategy
from autoshard.runtime import operators
from autoshard.runtime.collectives import I, P, S
from autoshard.runtime.operators import Bound, share_of_mean


def _reduced(call: OpCall) -> tuple[list[int], list[int]]:
    tensor = call.tensor("self")
    assert tensor is not None
    every = list(range(tensor.dim()))
    return (call.dims("dim", tensor.dim()) if "dim" in call else every), list(tensor.shape)


def summed(call: OpCall) -> Iterator[Strategy]:
    """sum: S(d) of a summed dim gives P; other dims stay; linear."""
    yield from along(reducing("dim" if "dim" in call else None))(call)
    dims, shape = _reduced(call)
    for d in dims:
        if differentiable(call.result) and differentiable(call.tensor("self")):
            if call.fits(shape[d], f"{call.op}: dim {d}"):
                yield call.strategy({"self": S(d)}, P)


def averaged(call: OpCall) -> Iterator[Strategy]:
    """mean: as sum, each rank's mean weighted by its share of the rows."""
    yield from along(reducing("dim" if "dim" in call else None))(call)
    dims, shape = _reduced(call)
    for d in dims:
        if call.fits(shape[d], f"{call.op}: dim {d}"):
            extent = shape[d] if isinstance(shape[d], int) else None
            impl = Bound.of(share_of_mean, op=call.target, sharded_dim=d, extent=extent)
            yield call.strategy({"self": S(d)}, P, impl)


def logsumexp(call: OpCall) -> Iterator[Strategy]:
    """Other dims stay; over one sharded dim, two all-reduces of what is left of the rest."""
    yield from along(reducing(), linear=False)(call)
    dims, shape = _reduced(call)
    for d in dims:
        if len(dims) == 1 and call.fits(shape[d], f"{call.op}: dim {d}"):
            row = call.results[0].element_size() * count(call.results[0].shape)
            traffic = [ImplCollective("all_reduce", row)] * 2
            yield call.strategy({"self": S(d)}, I, operators.logsumexp, traffic)


def normalized_over(dim_impl: Callable[..., Any]) -> Callable[[OpCall], Iterator[Strategy]]:
    """softmax and log_softmax: other dims stay; over the sharded dim, two small all-reduces."""

    def rule(call: OpCall) -> Iterator[Strategy]:
        yield from along(except_dims(), linear=False)(call)
        dims, shape = _reduced(call)
        for d in dims:
            if shape and call.fits(shape[d], f"{call.op}: dim {d}"):
                row = call.results[0].element_size() * count(shape) // (hint(shape[d]) or 1)
                traffic = [ImplCollective("all_reduce", row, back) for back in (False, False, True)]
                yield call.strategy({"self": S(d)}, S(d), dim_impl, traffic)

    return rule
