"""Memory that the GPUs of a group reach of each other: private parts of torch.distributed."""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist

from autoshard.runtime.compat.groups import process_group
from autoshard.runtime.compat.modes import real_tensors


def is_running(group: str) -> bool:
    """Whether the name is that of a process group of this process."""
    if not dist.is_initialized():
        return False
    try:
        process_group(group)
    except (RuntimeError, ValueError):
        return False
    return True


@functools.cache
def has_symmetric_memory(group: str) -> bool:
    """Whether the ranks of a group are GPUs that reach each other's memory.

    Only a try shows it: the rendezvous fails where they do not. Collective at its first use.
    """
    from torch.distributed import _symmetric_memory as symmetric

    members, here = process_group(group), torch.cuda.device_count()
    ranks = dist.get_process_group_ranks(members)
    if any(rank // here != ranks[0] // here for rank in ranks):
        return False  # of several machines
    with real_tensors():
        reached = True
        try:
            symmetric.get_symm_mem_workspace(group, 1024)  # type: ignore[arg-type]
        except RuntimeError:
            reached = False
        every = torch.tensor([reached], dtype=torch.int32, device="cuda")
        dist.all_reduce(every, dist.ReduceOp.MIN, group=members)
        return bool(every.item())


def symmetric_buffer(group: str, nbytes: int, like: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """A tensor like `like` in the group's symmetric memory, which has `nbytes`; whether the switch
    between the ranks sums."""
    from torch.distributed import _symmetric_memory as symmetric

    memory = symmetric.get_symm_mem_workspace(group, nbytes)  # type: ignore[arg-type]
    buffer = memory.get_buffer(memory.rank, like.shape, like.dtype)
    return buffer, bool(memory.multicast_ptr)


def symmetric_sum(kernel: str, buffer: torch.Tensor, x: torch.Tensor, group: str) -> torch.Tensor:
    """The sum of the ranks' `x` by way of `buffer`.

    kernel: "one_shot", "two_shot" or "multimem".
    """
    operators = torch.ops.symm_mem
    if kernel == "one_shot":
        return operators.one_shot_all_reduce_copy(buffer, x, "sum", group)  # type: ignore[no-any-return]
    buffer.copy_(x)
    if kernel == "two_shot":
        return operators.two_shot_all_reduce_out(buffer, "sum", group, torch.empty_like(x))  # type: ignore[no-any-return]
    return operators.multimem_all_reduce_(buffer, "sum", group).clone()  # type: ignore[no-any-return]
