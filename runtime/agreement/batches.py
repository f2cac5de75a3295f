"""The batch of a group of ranks that compute one thing together: compared, or sent by the first."""

import hashlib
from collections.abc import MutableSequence, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from autoshard.runtime import compat
from autoshard.runtime.agreement.consensus import agree, ask
from autoshard.runtime.agreement.regions import CollectiveRegion, with_processes
from autoshard.runtime.agreement.worlds import current_exchange
from autoshard.runtime.collectives import Axis
from autoshard.runtime.errors import BatchMismatchError
from autoshard.runtime.lazy_gather import LazyGather

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
    often: bool = False,
) -> None:
    """Raise BatchMismatchError on all ranks of the axis where their batches are not equal.

    contents: compare values too, bit for bit, not only dtypes and shapes. A tensor that autograd
    made of others is compared by shape: its own inputs were compared. A tensor on an accelerator
    is copied to the host. call: which call of which graph, for the error text. differs: whether
    that on an outer axis was found to differ: a rank of this axis that found none then raises too.
    often: whether calls such as this one are compared in each step: by a reduction of a digest over
    the axis, which asks nothing of the store where they are equal.
    """
    lines = [
        f"input {number} ({item.name}): {described(args[item.position], contents)}"
        for number, item in enumerate(inputs)
    ]
    lines.append(f"differs from that of another rank: {differs}")
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    if often and with_processes([axis]) and current_exchange() is not None:
        with CollectiveRegion(f"the comparison of batches ({call})", [axis], [axis]):
            if ask(int(digest[:15], 16), axis):
                return
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
