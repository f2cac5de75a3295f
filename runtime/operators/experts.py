"""A mixture of experts as one operator, and as a rank computes its part.

    autoshard::experts(x, ids, weights, stacks, body)

`x` [tokens, hidden]; the router's `ids` and `weights` [tokens, k] say which experts a token goes
to, and what each counts. A token has a row for each expert it chose; rows are sorted by expert, go
through `body` (expert_body.py), and the k rows of a token are summed. It is composite: AOTAutograd
traces through it to sort, index, grouped products and a sum, which compilers see as if the model
had written them. Nothing in it waits for the host, and every shape is known.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from autoshard.runtime.collectives import Axis, chunk_bounds
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
    place = torch.arange(order.shape[0], device=order.device, dtype=order.dtype)
    back = torch.empty_like(order).scatter(0, order, place)
    return out[back].reshape(weights.shape[0], k, out.shape[-1]).sum(1)


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
