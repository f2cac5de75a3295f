"""Memory that the GPUs of a group reach of each other: private parts of torch.distributed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from autoshard.runtime.compat.groups import once_a_world, process_group
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


@once_a_world
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


def gather_matmul(
    shard: torch.Tensor, weights: list[torch.Tensor], dim: int, whole: bool, group: str
) -> list[torch.Tensor]:
    """The gathered value, where `whole`, and its product with each weight, in pieces that are
    multiplied as they arrive. Torch allocates symmetric memory for the group itself; results may
    be strided."""
    import torch.distributed._symmetric_memory  # registers the operators

    operator = torch.ops.symm_mem.fused_all_gather_matmul
    gathered, products = operator(shard, weights, dim, group, return_A=whole)
    return [gathered, *products] if whole else list(products)


def matmul_scatter(x: torch.Tensor, weight: torch.Tensor, dim: int, group: str) -> torch.Tensor:
    """This rank's part of the ranks' sum of products, in pieces that leave as they are made."""
    import torch.distributed._symmetric_memory  # registers the operators

    operator = torch.ops.symm_mem.fused_matmul_reduce_scatter
    return operator(x, weight, "sum", dim, group)  # type: ignore[no-any-return]


def is_capturing() -> bool:
    """Whether kernels are being captured as a CUDA graph, which cannot be timed."""
    return torch.cuda.is_current_stream_capturing()


def gpu_milliseconds(run: Callable[[], Any], times: int = 3) -> float:
    """Time of the quickest of some runs, after one that allocates what it needs."""
    run()
    found = []
    for _ in range(times):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end))
    return min(found)
