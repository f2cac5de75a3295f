"""A mixture of experts whose tokens and experts are both split: rows travel to their experts.

    dispatch   each rank sends the rows of its tokens to the ranks of the experts they chose
    experts    each rank sorts what arrives by expert and computes it
    combine    the results go back the way they came, and a token's k rows are summed

How many rows arrive is known when they are counted, not before: ranks exchange the counts, and the
host reads them, once a mixture and forward pass (`ranks_counts`). Nothing bounds the rows and none
is dropped; a rank to which nobody sends a row takes part in every collective with none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from autoshard.runtime import compat
from autoshard.runtime.collectives import (
    PREFIX,
    Axis,
    all_to_all,
    chunk_bounds,
    chunk_size,
    exchange,
)
from autoshard.runtime.operators.expert_body import parse

_library = torch.library.Library("autoshard", "FRAGMENT")
_c10d = torch.ops._c10d_functional


def exchanged_experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    stacks: Sequence[torch.Tensor],
    body: str,
    *,
    experts: int,
    axis: Axis,
) -> torch.Tensor:
    """The result for this rank's tokens, of experts wherever they are.

    x, ids, weights: of this rank's tokens. experts: of the whole mixture; `stacks` hold this
    rank's. An expert that nobody chose has a gradient, of zeros.
    """
    k, here = weights.shape[1], chunk_bounds(experts, axis)[1]
    ordered, order = torch.sort(ids.reshape(-1))
    received, counts = _counted(ordered, experts, axis)
    there = dispatch_rows(x[order // k], counts, axis)
    weight = exchange_rows(weights.reshape(-1)[order], counts, there.shape[0], axis)
    # they arrive rank by rank, and from each by expert
    place = torch.arange(there.shape[0], device=x.device)
    owner = torch.searchsorted(received.cumsum(0), place, right=True) % chunk_size(
        experts, axis.size
    )
    owner, by_expert = torch.sort(owner)
    numbers = torch.arange(here, device=x.device)
    offs = torch.searchsorted(owner, numbers, right=True, out_int32=True)
    out = parse(body).run(there[by_expert], weight[by_expert], owner, offs, stacks)
    out = exchange_rows(out[_inverse(by_expert)], counts.flip(0), order.shape[0], axis)
    return out[_inverse(order)].reshape(weights.shape[0], k, out.shape[-1]).sum(1)


def _counted(ordered: torch.Tensor, experts: int, axis: Axis) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows that each rank sends to each expert here, rank by rank; rows sent to and received from
    each rank, on the host).

    ordered: the experts of this rank's rows, sorted.
    """
    ends = torch.searchsorted(ordered, torch.arange(experts, device=ordered.device), right=True)
    counted = ends.diff(prepend=ends.new_zeros(1))
    share = chunk_size(experts, axis.size)
    sent = F.pad(counted, [0, share * axis.size - experts])  # the last ranks may have fewer
    received = all_to_all(sent, axis)
    return received, torch.ops.autoshard.ranks_counts(sent, received, axis.size)


def _inverse(order: torch.Tensor) -> torch.Tensor:
    place = torch.arange(order.shape[0], device=order.device, dtype=order.dtype)
    return torch.empty_like(order).scatter(0, order, place)


def dispatch_rows(x: torch.Tensor, counts: torch.Tensor, axis: Axis) -> torch.Tensor:
    """The rows that arrive here, rank by rank, of the rows `x` that leave, rank by rank.

    counts: int64[2, ranks] on the host, rows sent to and received from each.
    """
    found: torch.Tensor = _Exchange.apply(x, counts, None, axis)
    return found


def exchange_rows(
    x: torch.Tensor, counts: torch.Tensor, rows: int | torch.SymInt, axis: Axis
) -> torch.Tensor:
    """`dispatch_rows` where it is known how many rows arrive."""
    found: torch.Tensor = _Exchange.apply(x, counts, rows, axis)
    return found


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        x: torch.Tensor,
        counts: torch.Tensor,
        rows: int | torch.SymInt | None,
        axis: Axis,
    ) -> torch.Tensor:
        ctx.save_for_backward(counts)
        ctx.of = x.shape[0], axis
        of = axis.size, axis.rank, axis.group
        if rows is None:
            return torch.ops.autoshard.dispatch_rows(x, counts, *of)  # type: ignore[no-any-return]
        return torch.ops.autoshard.exchange_rows(x, counts, rows, *of)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        (counts,) = ctx.saved_tensors
        rows, axis = ctx.of
        return exchange_rows(grad, counts.flip(0), rows, axis), None, None, None


# The operators. What they do depends on numbers that the host reads, so compilers see them whole.

_library.define("ranks_counts(Tensor sent, Tensor received, int n) -> Tensor")
_library.define("dispatch_rows(Tensor x, Tensor counts, int n, int rank, str group) -> Tensor")
_library.define(
    "exchange_rows(Tensor x, Tensor counts, SymInt rows, int n, int rank, str group) -> Tensor"
)


def _ranks_counts(sent: torch.Tensor, received: torch.Tensor, n: int) -> torch.Tensor:
    return torch.stack((sent, received)).reshape(2, n, -1).sum(-1).cpu()


def _dispatch(x: torch.Tensor, counts: torch.Tensor, n: int, rank: int, group: str) -> torch.Tensor:
    return _exchange(x, counts, 0, n, rank, group)


def _exchange(
    x: torch.Tensor, counts: torch.Tensor, rows: int, n: int, rank: int, group: str
) -> torch.Tensor:
    sent, received = counts.tolist()
    if group.startswith(PREFIX):
        axis = Axis("", n, rank, group)
        every = exchange(axis, "counts of rows", counts)
        parts = exchange(axis, "rows", x)
        blocks = [part.split(of[0].tolist())[rank] for part, of in zip(parts, every)]
        return torch.cat(blocks)
    moved = _c10d.all_to_all_single(x.contiguous(), received, sent, group)
    found: torch.Tensor = _c10d.wait_tensor(moved)
    return found


_library.impl("ranks_counts", _ranks_counts, "CompositeExplicitAutograd")
_library.impl("dispatch_rows", _dispatch, "CompositeExplicitAutograd")
_library.impl("exchange_rows", _exchange, "CompositeExplicitAutograd")


def _fake_counts(sent: torch.Tensor, received: torch.Tensor, n: int) -> torch.Tensor:
    return sent.new_empty((2, n), device="cpu")


def _fake_dispatch(
    x: torch.Tensor, counts: torch.Tensor, n: int, rank: int, group: str
) -> torch.Tensor:
    # as many as leave, if experts are chosen evenly
    return x.new_empty((compat.unknown_size(x, x.shape[0]), *x.shape[1:]))


def _fake_exchange(
    x: torch.Tensor, counts: torch.Tensor, rows: torch.SymInt, n: int, rank: int, group: str
) -> torch.Tensor:
    return x.new_empty((rows, *x.shape[1:]))


torch.library.register_fake("autoshard::ranks_counts", _fake_counts, lib=_library)
torch.library.register_fake("autoshard::dispatch_rows", _fake_dispatch, lib=_library)
torch.library.register_fake("autoshard::exchange_rows", _fake_exchange, lib=_library)
