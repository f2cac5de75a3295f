"""Rows that ranks exchange, to each as many as it is sent: an all-to-all of uneven blocks.

How many rows arrive is known when they are counted, not before, so the host reads the counts
(`counts_on_host`), once for all exchanges there and back, forward and backward. Compilers see a
size that is known at run time only. A rank to which nobody sends a row takes part all the same, and
has one row of zeros, which it sends to nobody: kernels refuse products over no row at all.
"""

from typing import Any

import torch

from autoshard.runtime import compat
from autoshard.runtime.collectives.axis import Axis
from autoshard.runtime.collectives.lockstep import PREFIX, exchange

_c10d = torch.ops._c10d_functional


def counts_on_host(sent: torch.Tensor, received: torch.Tensor, axis: Axis) -> torch.Tensor:
    """int64[2, ranks] on the host: rows sent to and received from each rank; waits for the device.

    sent, received: int64[ranks * m], rows of m kinds for each rank.
    """
    found: torch.Tensor = torch.ops.autoshard.counts_on_host(sent, received, axis.size)
    return found


def dispatch_rows(x: torch.Tensor, counts: torch.Tensor, axis: Axis) -> torch.Tensor:
    """The rows that arrive here, rank by rank, of the rows `x` that leave, rank by rank; at least
    one row, of zeros where none arrives.

    counts: int64[2, ranks] on the host, rows sent to and received from each.
    """
    found: torch.Tensor = _Exchange.apply(x, counts, None, axis)
    return found


def exchange_rows(
    x: torch.Tensor, counts: torch.Tensor, rows: int | torch.SymInt, axis: Axis
) -> torch.Tensor:
    """`dispatch_rows` where it is known how many rows there are here afterwards."""
    found: torch.Tensor = _Exchange.apply(x, counts, rows, axis)
    return found


def leaving(order: torch.Tensor, counts: torch.Tensor, ranks: int) -> torch.Tensor:
    """The first of the rows in `order`, as many as are sent; at least one, which stays if none is.

    ranks: of how many one is expected, in the mean, to send a row.
    """
    found: torch.Tensor = torch.ops.autoshard.leaving_rows(order, counts, ranks)
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


def _counts(sent: torch.Tensor, received: torch.Tensor, n: int) -> torch.Tensor:
    return torch.stack((sent, received)).reshape(2, n, -1).sum(-1).cpu()


def _leaving(order: torch.Tensor, counts: torch.Tensor, ranks: int) -> torch.Tensor:
    return order.narrow(0, 0, max(1, int(counts[0].sum()))).clone()


def _dispatch(x: torch.Tensor, counts: torch.Tensor, n: int, rank: int, group: str) -> torch.Tensor:
    arriving = int(counts[1].sum())
    return _exchange(x, counts, max(1, arriving), n, rank, group)


def _exchange(
    x: torch.Tensor, counts: torch.Tensor, rows: int, n: int, rank: int, group: str
) -> torch.Tensor:
    sent, received = counts.tolist()
    if group.startswith(PREFIX):
        axis = Axis("", n, rank, group)
        every = exchange(axis, "counts of rows", counts)
        parts = exchange(axis, "rows", x)
        cut = [[*of[0].tolist(), len(part) - int(of[0].sum())] for part, of in zip(parts, every)]
        found = torch.cat([part.split(sizes)[rank] for part, sizes in zip(parts, cut)])
    else:
        leaving = x.contiguous().narrow(0, 0, sum(sent))
        found = _c10d.wait_tensor(_c10d.all_to_all_single(leaving, received, sent, group))
    missing = rows - found.shape[0]  # of those that have not travelled, or that there are none
    return torch.cat([found, found.new_zeros((missing, *x.shape[1:]))]) if missing else found


for _schema, _kernel, _fake in (
    (
        "counts_on_host(Tensor sent, Tensor received, int n) -> Tensor",
        _counts,
        lambda sent, received, n: sent.new_empty((2, n), device="cpu"),
    ),
    (
        "leaving_rows(Tensor order, Tensor counts, int ranks) -> Tensor",
        _leaving,
        lambda order, counts, ranks: order.new_empty(
            (compat.unknown_size(order, order.shape[0] // ranks),)
        ),
    ),
    (
        "dispatch_rows(Tensor x, Tensor counts, int n, int rank, str group) -> Tensor",
        _dispatch,
        # as many as leave, if experts are chosen evenly
        lambda x, *_: x.new_empty((compat.unknown_size(x, x.shape[0]), *x.shape[1:])),
    ),
    (
        "exchange_rows(Tensor x, Tensor counts, SymInt rows, int n, int rank, str group) -> Tensor",
        _exchange,
        lambda x, counts, rows, *_: x.new_empty((rows, *x.shape[1:])),
    ),
):
    # a CUDA graph cannot hold them either, and goes around them
    compat.define_operator(_schema, _kernel, _fake, (torch.Tag.cudagraph_unsafe,))

EXCHANGES = (
    torch.ops.autoshard.dispatch_rows.default,
    torch.ops.autoshard.exchange_rows.default,
)
"""The operators in a graph. The last argument names the process group, as of torch's own."""
