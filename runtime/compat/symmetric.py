"""Memory that the GPUs of a group reach of each other: private parts of torch.distributed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from autoshard.runtime.compat.groups import once_a_world, process_group
from autoshard.runtime.compat.modes import real_tensors


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
