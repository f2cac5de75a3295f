"""Operators that take a fused dim apart ([q | k | v], [gate | up]) while it is sharded.

A shard of the fused dim holds rows of one part or of two; one all-to-all of a shard's size gives
every rank its share of each part.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from autoshard.planning.rules.call import OpCall, differentiable
from autoshard.planning.sizes import count, is_one, same
from autoshard.planning.strategy import ImplCollective, Strategy, value
from autoshard.runtime.collectives import S
from autoshard.runtime.operators import Bound, pieces, split_parts, unfold_parts, with_parts

MOST_PIECES = 64  # blocks a rank cuts its shard into, at most


def split(call: OpCall) -> Iterator[Strategy]:
    """split and chunk along the sharded dim, where every part divides."""
    tensor = call.tensor("self")
    assert tensor is not None
    (dim,) = call.dims("dim", tensor.dim())
    sizes = [part.shape[dim] for part in call.result]
    traffic = _traffic(call, tensor, dim, sizes)
    if traffic:
        impl = Bound.of(split_parts, sharded_dim=dim, sizes=tuple(sizes))
        yield call.strategy({"self": S(dim)}, S(dim), impl, traffic)


def gated(call: OpCall) -> Iterator[Strategy]:
    """glu along the sharded dim."""
    tensor = call.tensor("self")
    assert tensor is not None
    (dim,) = call.dims("dim", tensor.dim())
    sizes = [call.result.shape[dim]] * 2
    traffic = _traffic(call, tensor, dim, sizes)
    if traffic:
        impl = Bound.of(with_parts, op=call.target, sharded_dim=dim, sizes=tuple(sizes))
        yield call.strategy({"self": S(dim)}, S(dim), impl, traffic)


def unfolded(call: OpCall) -> Iterator[Strategy]:
    """A view [.., 3 * h, ..] -> [.., 3, h, ..]: sharded on h, where 3 does not divide."""
    before, after = value(call.operands[0]).shape, call.result.shape
    extra = len(after) - len(before)
    if extra < 1:
        return
    dim = 0
    while dim < len(before) and same(before[dim], after[dim]):
        dim += 1
    tail = len(before) - dim - 1
    if dim == len(before) or not all(map(same, before[dim + 1 :], after[len(after) - tail :])):
        return
    shape = after[dim : len(after) - tail]
    if not all(isinstance(size, int) for size in shape) or is_one(shape[0]):
        return
    if shape[0] % call.n == 0 or not call.fits(shape[1], f"{call.op}: dim {dim + 1}", even=True):
        return
    tensor = value(call.operands[0])
    traffic = _traffic(call, tensor, dim, [before[dim] // shape[0]] * shape[0])
    if traffic:
        impl = Bound.of(unfold_parts, sharded_dim=dim, shape=tuple(shape))
        yield call.strategy({"self": S(dim)}, S(dim + 1), impl, traffic)


def _traffic(
    call: OpCall, tensor: torch.Tensor, dim: int, sizes: Sequence[int | torch.SymInt]
) -> list[ImplCollective]:
    """The all-to-alls of taking the dim apart; none where it cannot be done (call keeps why)."""
    label = f"{call.op}: a part of dim {dim}"
    known = [size for size in sizes if isinstance(size, int)]
    if len(known) < len(sizes) or len(sizes) < 2:
        return []
    if not all([call.fits(size, label, even=True) for size in known]):
        return []
    if pieces(known, call.n) > MOST_PIECES:
        call.decline(f"{label}: its rows would move in more than {MOST_PIECES} pieces")
        return []
    others = count(size for d, size in enumerate(tensor.shape) if d != dim)
    nbytes = sum(known) // call.n * others * tensor.element_size()
    forward = ImplCollective("all_to_all", nbytes)
    return [forward, forward._replace(backward=True)] if differentiable(tensor) else [forward]
