"""A mixture of experts as one operator, and as a rank computes its part.

    autoshard::experts(x, ids, weights, stacks, body)

`x` [tokens, hidden]; the router's `ids` and `weights` [tokens, k] say which experts a token goes
to, and what each counts. A token has a row for each expert it chose; rows are sorted by expert, go
through `body` (expert_body.py), and the k rows of a token are summed. It is composite: AOTAutograd
traces through it to sort, index, grouped products and a sum, which compilers see as if the model
had written them. Nothing in it waits for the host, and every shape is known, but where tokens and
experts are both split (`exchanged_experts`): how many rows travel to a rank is known when they are
counted.

Where experts are split over an axis ep besides, each algorithm of the planned axis is told of it as
`over`: what it has left to compute here is a mixture whose stacks are those of a rank of ep, and
rows travel there (`_exchanged`).
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import fx

from autoshard.runtime import compat
from autoshard.runtime.collectives import (
    Axis,
    all_to_all,
    chunk_bounds,
    chunk_size,
    counts_on_host,
    dispatch_rows,
    exchange_rows,
    leaving,
)
from autoshard.runtime.operators.bound import unbound
from autoshard.runtime.operators.expert_body import parse
from autoshard.runtime.operators.fused_dims import regroup

# As in runtime/randomness/draws.py: count up when the operator gives other numbers.
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
    ordered, order, offs = _by_expert(chosen, experts)
    rows, weight = x[order // k], weights.reshape(-1)[order]
    foreign = None
    if here is not None:
        foreign = (ordered >= here).unsqueeze(-1)
        ordered = ordered.clamp(max=here - 1)
    out = parse(body).run(rows, weight, ordered, offs, stacks, foreign)
    return out[_inverse(order)].reshape(weights.shape[0], k, out.shape[-1]).sum(1)


def _by_expert(
    chosen: torch.Tensor, experts: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The expert of each row in order, the rows in that order, and where each expert's end."""
    ordered, order = torch.sort(chosen)
    counted = torch.arange(experts, device=chosen.device, dtype=chosen.dtype)
    # int32, which grouped products want; a histogram counts in floating numbers on some devices
    return ordered, order, torch.searchsorted(ordered, counted, right=True, out_int32=True)


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
    over: Axis | None = None,
    parts: int = 1,
) -> torch.Tensor:
    """The part of the sum that this rank's experts make of every token; a partial sum.

    experts: of the whole mixture; `stacks` hold this rank's; parts: as in `exchanged_experts`, over
    an axis ep. Rows of other ranks' experts sort
    behind its own, where grouped products do not compute, and count zero; over an axis ep they do
    not travel. An expert that nobody chose has a gradient, of zeros.
    """
    start, here = chunk_bounds(experts, axis)
    local = ids.reshape(-1) - start
    mine = (local >= 0) & (local < here)
    chosen = torch.where(mine, local, here)
    if over is not None:
        if parts > 1:
            chosen = torch.where(mine, _by_rank(local, here, parts, over.size), here)
        return _exchanged(x, chosen, weights, stacks, body, here, over, among=axis.size)
    return _routed(x, chosen, weights, stacks, body, here)


def exchanged_experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    stacks: Sequence[torch.Tensor],
    body: str,
    *,
    experts: int,
    axis: Axis,
    over: Axis | None = None,
    parts: int = 1,
) -> torch.Tensor:
    """The result for this rank's tokens, of experts wherever they are.

    x, ids, weights: of this rank's tokens. experts: of the whole mixture; `stacks` hold this
    rank's, by rows of each of `parts` equal parts of them: more than one where stacks that are
    stored by experts on a planned axis too, or on one before ep, are gathered there, and not on ep;
    with `over`, of what that axis splits. An expert that nobody chose has a gradient, of zeros.
    """
    chosen = ids.reshape(-1)
    if parts > 1 and over is None:
        chosen = _by_rank(chosen, experts, parts, axis.size)
    return _exchanged(x, chosen, weights, stacks, body, experts, axis, over, parts=parts)


def rows_travel(node: fx.Node) -> list[Axis]:
    """The axes over which a node sends rows to their experts; none of any other node."""
    function = unbound(node.target)[0] if node.op == "call_function" else None  # type: ignore[arg-type]
    axes = [node.kwargs["axis"]] if function is exchanged_experts else []
    if function in (exchanged_experts, owned_experts, split_experts) and "over" in node.kwargs:
        axes.append(node.kwargs["over"])
    return axes  # type: ignore[return-value]


def _by_rank(chosen: torch.Tensor, experts: int, parts: int, ranks: int) -> torch.Tensor:
    """The number of each expert if those of a rank were numbered one after the other."""
    share = experts // parts // ranks
    part, rank = chosen // (share * ranks), chosen // share % ranks
    return (rank * parts + part) * share + chosen % share


def rank_rows(stack: torch.Tensor, *, axis: Axis, parts: int = 1) -> torch.Tensor:
    """The experts of a rank of ep of a whole stack. parts: as in `exchanged_experts`."""
    if parts == 1:
        return stack.narrow(0, *chunk_bounds(stack.shape[0], axis))
    return stack.unflatten(0, (parts, axis.size, -1))[:, axis.rank].flatten(0, 1)


def _exchanged(
    x: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    stacks: Sequence[torch.Tensor],
    body: str,
    experts: int,
    axis: Axis,
    over: Axis | None = None,
    among: int = 1,
    parts: int = 1,
) -> torch.Tensor:
    """parts: as in `exchanged_experts`, of `over`. chosen: the expert of each row. among: the ranks
    that have the same tokens and `experts` each; rows of the others' have the number `experts`,
    stay where they are, and count zero."""
    k, here = weights.shape[1], chunk_bounds(experts, axis)[1]
    ordered, order = torch.sort(chosen)
    received, counts = _counted(ordered, experts, axis)
    rows = order.shape[0]
    if among > 1:
        order = leaving(order, counts, among)
    there = dispatch_rows(x[order // k], counts, axis)
    weight = exchange_rows(weights.reshape(-1)[order], counts, there.shape[0], axis)
    # they arrive rank by rank, and from each by expert
    place = torch.arange(there.shape[0], device=x.device)
    owner = torch.searchsorted(received.cumsum(0), place, right=True) % chunk_size(
        experts, axis.size
    )
    if over is not None:
        if parts > 1:
            owner = _by_rank(owner, here, parts, over.size)
        out = _exchanged(there, owner, weight.unsqueeze(1), stacks, body, here, over)
    else:
        owner, by_expert, offs = _by_expert(owner, here)
        out = parse(body).run(there[by_expert], weight[by_expert], owner, offs, stacks)
        out = out[_inverse(by_expert)]
    out = exchange_rows(out, counts.flip(0), order.shape[0], axis)
    if among > 1:
        out = out.new_zeros((rows, out.shape[-1])).index_copy(0, order, out)
    else:
        out = out[_inverse(order)]
    return out.reshape(weights.shape[0], k, out.shape[-1]).sum(1)


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
    experts: int = 0,
    over: Axis | None = None,
    parts: int = 1,
) -> torch.Tensor:
    """Every expert's part of the sum that this rank's share of their inner dim makes; partial.

    local_body: the body with the sizes of a share. packed: (stack, dim, whole sizes of the parts)
    of stacks that hold [gate | up] one behind the other: ranks exchange rows of these weights, so
    that each has its share of both. experts, parts: as in `exchanged_experts`, over an axis ep.
    """
    own = list(stacks)
    for i, dim, sizes in packed:
        # grouped products want each matrix in one piece
        own[i] = regroup(own[i], dim, sizes, axis).contiguous()
    if over is not None:
        return exchanged_experts(
            x, ids, weights, own, local_body, experts=experts, axis=over, parts=parts
        )
    return _mixture(x, ids, weights, own, local_body)


EXPERTS = compat.define_operator(
    f"experts.{_VERSION}(Tensor x, Tensor ids, Tensor weights, Tensor[] stacks, str body)"
    " -> Tensor",
    _mixture,
)
