"""Ranks compare what they are about to do, before any of them does it: a plan, or a batch.

The batch of a group of ranks that compute one thing together is compared, or sent by the first.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, MutableSequence, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from autoshard.runtime import compat
from autoshard.runtime.agreement.store_exchange import PeerFailed
from autoshard.runtime.agreement.worlds import current_exchange
from autoshard.runtime.collectives import Axis
from autoshard.runtime.errors import AutoshardError, BatchMismatchError, PlanMismatchError, message
from autoshard.runtime.lazy_gather import LazyGather

_MISSING = "(nothing)"
REMEDY = (
    "Build the same model, with the same options and library versions, and call it with inputs of "
    "the same shapes on every rank."
)
FAILED = (
    "See the output of that rank; if it has no error, compare the shapes of the ranks' batches, "
    "and their options. Then start all processes again."
)


def agree(
    what: str,
    digest: str,
    detail: Sequence[str],
    axis: Axis,
    *,
    note: str = "",
    error: type[AutoshardError] = PlanMismatchError,
    remedy: str = REMEDY,
) -> None:
    """Return where all ranks of `axis` gave the same digest; raise `error` on all of them where
    they did not.

    what: the thing compared, for the error text; note: more of it, such as the shapes of the call,
    for ranks that turn out to be at different things. digest: a hash of it. detail: its lines;
    they are exchanged only where digests differ, to name the first line that does. remedy: what to
    do about a difference, and about a rank that does not come.

    Every rank of the axis must call it; where one does not, because it failed, ended, or waits
    elsewhere, the others raise too. Does nothing on an axis of size 1, or one that has no process
    group (offline, lockstep).
    """
    if axis.size == 1 or ":" in axis.group:
        return
    here = f"{what} ({note})" if note else what
    ranks = members(axis)
    said_here = {"what": what, "here": here, "digest": digest}
    told: list[Any] = _exchange(said_here, here, axis, error, "" if remedy is REMEDY else remedy)
    # ranks that run different code may be in an exchange of values, which has no such entries
    given = [one if _is_said(one) else {"what": None, "here": "another exchange"} for one in told]
    if len({each["what"] for each in given}) > 1:
        said = "; ".join(f"rank {rank}: {each['here']}" for rank, each in zip(ranks, given))
        difference = f"are at different things; {said}"
        raise _failed(f"the ranks of axis {axis.name} {difference}", error, remedy)
    digests = [each["digest"] for each in given]
    if len(set(digests)) == 1:
        return
    details: list[list[str]] = _exchange(list(detail), here, axis, error)
    for number, lines in enumerate(zip_longest(*details, fillvalue=_MISSING)):
        if len(set(lines)) > 1:
            said = "; ".join(f"rank {rank}: {line}" for rank, line in zip(ranks, lines))
            difference = f"line {number + 1} is the first that differs: {said}"
            break
    else:
        said = ", ".join(f"rank {rank}: {text}" for rank, text in zip(ranks, digests))
        difference = f"their lines are equal and their digests are not: {said}"
    what = f"the ranks of axis {axis.name} disagree on the {what}; {difference}"
    raise _failed(what, error, remedy)


def ask(number: int, axis: Axis) -> bool:
    """Whether all ranks of an axis with processes gave the same number, of 63 bits.

    What each step compares: a collective of eight bytes of the host. Every rank must call it, in a
    `CollectiveRegion`, and `agree` where the numbers differ, for the error.
    """
    own = torch.tensor([number], device="cpu")
    given = own.new_empty(axis.size)
    dist.all_gather(list(given.split(1)), own, group=compat.host_group(axis.group))
    return len(set(given.tolist())) == 1


def _is_said(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() == {"what", "here", "digest"}


def _failed(what: str, error: type[AutoshardError], remedy: str) -> AutoshardError:
    """An error that every rank of an axis raises at this moment; ranks of others hear of it."""
    raised = error(message(what, remedy=remedy))
    exchange = current_exchange()
    if exchange is not None:
        exchange.fail(exchange.rank, f"{error.__name__}: {raised}")
    return raised


def members(axis: Axis) -> list[int]:
    """The ranks of the world that an axis is made of, in its order."""
    return dist.get_process_group_ranks(compat.process_group(axis.group))


def gather(value: Any, what: str, axis: Axis) -> list[Any]:
    """The values that the ranks of the axis gave, in their order; anything that JSON holds.

    Collective over the axis; `[value]` on one of size 1 or without a process group. what: the name
    of it in the errors of ranks that wait. Raises PlanMismatchError where a rank does not come.
    """
    if axis.size == 1 or ":" in axis.group:
        return [value]
    return _exchange(value, what, axis, PlanMismatchError)


def world_axis() -> Axis:
    """All ranks of the running world as one axis, for `gather`."""
    if not dist.is_initialized():
        return Axis("world", 1, 0, "")
    group = dist.group.WORLD
    assert group is not None
    return Axis("world", dist.get_world_size(), dist.get_rank(), group.group_name)


def from_first(value: Any, what: str, axis: Axis) -> Any:
    """The value that the first rank of the axis gave; see `gather`."""
    return gather(value if axis.rank == 0 else None, what, axis)[0]


@contextlib.contextmanager
def attempt() -> Iterator[None]:
    """A block of code that all ranks of a group run, such as a compilation.

    Whatever fails inside is told to the ranks that wait for this one in `agree`, who then raise
    PlanMismatchError with it. All of them raise it at each exchange from then on: after a failure
    that is caught, the processes must start again.
    """
    try:
        yield
    except compat.RESTARTS:  # Dynamo traces the frame again: nothing has failed
        raise
    except Exception as error:
        exchange = current_exchange()
        if exchange is not None:
            exchange.fail(exchange.rank, f"{type(error).__name__}: {error}")
        raise


def _exchange(
    value: Any, here: str, axis: Axis, error: type[AutoshardError], remedy: str = ""
) -> list[Any]:
    exchange = current_exchange()
    if exchange is None:
        return [value] * axis.size
    before = exchange.failure
    try:
        return exchange.exchange(value, here, members(axis))
    except PeerFailed as failure:
        waited = f"rank {exchange.rank} waited for it at the {here} of axis {axis.name}"
        if failure.rank == exchange.rank:
            waited = f"this is rank {exchange.rank}, at the {here} of axis {axis.name}"
        elif before is not None:
            waited = f"rank {exchange.rank} came to the {here} of axis {axis.name} after that"
            error = PlanMismatchError  # whatever was to be compared here
        raise error(message(f"{failure}; {waited}", remedy=f"{remedy} {FAILED}".strip())) from None


_SAME_BATCH = (
    "Give every rank of the axis the same batch (a sampler that divides by data-parallel ranks, "
    "not by processes), or set options={'same_inputs': {'batches': 'broadcast'}}."
)


class Input(NamedTuple):
    """A tensor of the batch: its place among the graph's arguments, and its name in the call."""

    position: int
    name: str


def compare_batch(
    args: Sequence[Any],
    inputs: Sequence[Input],
    axis: Axis,
    call: str,
    contents: bool,
    differs: bool = False,
) -> None:
    """Raise BatchMismatchError on all ranks of the axis where their batches are not equal.

    contents: compare values too, bit for bit, not only dtypes and shapes. A tensor that autograd
    made of others is compared by shape: its own inputs were compared. A tensor on an accelerator
    is copied to the host. call: which call of which graph, for the error text. differs: whether
    that on an outer axis was found to differ: a rank of this axis that found none then raises too.
    """
    lines = [
        f"input {number} ({item.name}): {described(args[item.position], contents)}"
        for number, item in enumerate(inputs)
    ]
    lines.append(f"differs from that of another rank: {differs}")
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    shapes = ", ".join(f"{item.name} {tuple(args[item.position].shape)}" for item in inputs)
    agree(
        "batch",
        digest,
        lines,
        axis,
        note=f"{call}: {shapes}",
        error=BatchMismatchError,
        remedy=_SAME_BATCH,
    )


def send_batch(args: MutableSequence[Any], inputs: Sequence[Input], axis: Axis) -> None:
    """Replace the batch in `args` by that of the axis' first rank.

    Every rank must give tensors of the same shapes and dtypes; theirs are not written to. What
    autograd made of other tensors stays: its own inputs were sent. Collective over the axis.
    """
    for item in inputs:
        if not _derived(args[item.position]):
            args[item.position] = _Send.apply(args[item.position], axis)


class _Send(torch.autograd.Function):
    """A broadcast whose gradient each rank keeps: it is the gradient of a replicated value."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis) -> torch.Tensor:  # type: ignore[override]
        sent = x.detach().clone(memory_format=torch.contiguous_format)
        dist.broadcast(sent, group=compat.process_group(axis.group), group_src=0)
        return sent if sent.stride() == x.stride() else torch.empty_like(x).copy_(sent)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return grad, None


def _derived(tensor: Any) -> bool:
    if isinstance(tensor, (DTensor, LazyGather)):
        return True
    return bool(tensor.requires_grad) and not tensor.is_leaf


def described(tensor: torch.Tensor, contents: bool = True) -> str:
    """The dtype and shape of a tensor, and a hash of its values where it has some of its own."""
    text = f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
    if not contents or _derived(tensor) or tensor.is_meta:
        return text
    return f"{text}, hash {_hash(tensor)}"


def _hash(tensor: torch.Tensor) -> str:
    with compat.real_tensors():
        flat = tensor.detach().to("cpu").contiguous().reshape(-1)
        octets: Any = flat.view(torch.uint8).numpy()
        return hashlib.blake2b(octets, digest_size=6).hexdigest()
