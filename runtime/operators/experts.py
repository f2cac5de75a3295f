"""A mixture of experts as one operator, and as a rank computes its part.

    autoshard::experts(x, ids, weights, stacks, body)

`x` [tokens, hidden]; the router's `ids` and `weights` [tokens, k] say which experts a token goes
to, and what each counts. A token has a row for each expert it chose; rows are sorted by expert, go
through `body` (expert_body.py), and the k rows of a token are summed. It is composite: AOTAutograd
traces through it to sort, index, grouped products and a sum, which compilers see as if the model
had written them. Nothing in it waits for the host, and every shape is known, but where tokens and
experts are both split (`exchanged_experts`): how many rows travel to a rank is known when they are
counted.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from autoshard.runtime.collectives import (
    Axis,
    all_to_all,
    chunk_bounds,
    chunk_size,
    counts_on_host,
    dispatch_rows,
    exchange_rows,
)
from autoshard.runtime.operators.expert_body import parse
from autoshard.runtime.operators.fused_dims import regroup

_library = torch.library.Library("autoshard", "FRAGMENT")
# As in runtime/randomness/operators.py: count up when the operator gives other numbers.
_VERSION = "v1"


def _mixture(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    stacks: Sequence[torch.Tensor],
    body: str,
) -> torch.Tensor:
    return _routed(x, ids.reshape(-1), weights, stacks, body, None)


def _routed(
    x: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    stacks: Sequence[torch.Tensor],
    body: str,
    here: int | None,
) -> torch.Tensor:
    """chosen: the expert of each row. here: how many experts this rank holds, rows of others
    having this number; None where it holds all."""
    k, experts = weights.shape[1], stacks[0].shape[0]
    ordered, order = torch.sort(chosen)
    counted = torch.arange(experts, device=chosen.device, dtype=chosen.dtype)
    # int32, which grouped products want; a histogram counts in floating numbers on some devices
    offs = torch.searchsorted(ordered, counted, right=True, out_int32=True)
    rows, weight = x[order // k], weights.reshape(-1)[order]
    foreign = None
    if here is not None:
        foreign = (ordered >= here).unsqueeze(-1)
        ordered = ordered.clamp(max=here - 1)
    out = parse(body).run(rows, weight, ordered, offs, stacks, foreign)
    return out[_inverse(order)].reshape(weights.shape[0], k, out.shape[-1]).sum(1)


def _inverse(order: torch.Tensor) -> torch.Tensor:
    place = torch.arange(order.shape[0], device=order.device, dtype=order.dtype)
    return torch.empty_like(order).scatter(0, order, place)


def owned_experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    stacks: Sequence[torch.Tensor],
    body: str,
    *,
    experts: int,
    axis: Axis,
) -> torch.Tensor:
    """The part of the sum that this rank's experts make of every token; a partial sum.

    experts: of the whole mixture; `stacks` hold this rank's. Rows of other ranks' experts sort
    behind its own, where grouped products do not compute, and count zero. An expert that nobody
    chose has a gradient, of zeros.
    """
    start, here = chunk_bounds(experts, axis)
    local = ids.reshape(-1) - start
    mine = (local >= 0) & (local < here)
    return _routed(x, torch.where(mine, local, here), weights, stacks, body, here)


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
    return received, counts_on_host(sent, received, axis)


def split_experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    stacks: Sequence[torch.Tensor],
    body: str,
    *,
    local_body: str,
    packed: tuple[tuple[int, int, tuple[int, ...]], ...],
    axis: Axis,
) -> torch.Tensor:
    """Every expert's part of the sum that this rank's share of their inner dim makes; partial.

    local_body: the body with the sizes of a share. packed: (stack, dim, whole sizes of the parts)
    of stacks that hold [gate | up] one behind the other: ranks exchange rows of these weights, so
    that each has its share of both.
    """
    own = list(stacks)
    for i, dim, sizes in packed:
        # grouped products want each matrix in one piece
        own[i] = regroup(own[i], dim, sizes, axis).contiguous()
    return _mixture(x, ids, weights, own, local_body)


_library.define(
    f"experts.{_VERSION}(Tensor x, Tensor ids, Tensor weights, Tensor[] stacks, str body) -> Tensor"
)
_library.impl(f"experts.{_VERSION}", _mixture, "CompositeImplicitAutograd")
EXPERTS = getattr(torch.ops.autoshard.experts, _VERSION)
