"""Sums of small tensors over the ranks of one machine, without the latency of NCCL.

A decode step reduces a few kilobytes twice a layer. Where the GPUs of an axis reach each other's
memory, each rank reads the others' addends itself: `one_shot` reads all of them, `two_shot` sums
its share and reads the shares, and `multimem` lets the switch sum. Which is quickest depends on
the bytes and on the ranks; torch has them all, over symmetric memory.
"""

from __future__ import annotations

import torch

from autoshard.runtime import compat
from autoshard.runtime.collectives import Axis, all_reduce
from autoshard.runtime.errors import ConfigError, message

KIB, MIB = 1024, 1024 * 1024
MOST_BYTES = 8 * MIB
"""What is larger is NCCL's: bandwidth counts, and not latency."""

DTYPES = (torch.float32, torch.bfloat16)
"""What the kernels of torch sum."""


def kernel_of(nbytes: int, n: int, multicast: bool) -> str:
    """The way to sum `nbytes` on `n` ranks: "one_shot", "two_shot", "multimem" or "nccl".

    multicast: whether the switch between them can sum. The limits are those of vLLM's custom
    all-reduce; addresses are in steps of 16 bytes a rank.
    """
    if nbytes > MOST_BYTES or nbytes % 16:
        return "nccl"
    few = {2: MOST_BYTES, 3: 512 * KIB, 4: 512 * KIB}.get(n, 256 * KIB)
    if nbytes <= (few if not multicast else min(few, 128 * KIB)):
        return "one_shot"
    if nbytes % (16 * n):
        return "nccl"
    return "multimem" if multicast else "two_shot"


def has_low_latency(x: torch.Tensor, axis: Axis) -> bool:
    """Whether a sum of `x` over the axis can have another kernel than the backend's own.

    Raises ConfigError on GPUs that do not reach each other's memory.
    """
    if x.device.type != "cuda" or x.dtype not in DTYPES or not compat.is_running(axis.group):
        return False
    if not compat.has_symmetric_memory(axis.group):
        raise ConfigError(
            message(
                f"options['small_sums'] is 'symmetric_memory', and the {axis.size} GPUs of "
                f"{axis.name} do not reach each other's memory",
                remedy="Put the axis on GPUs of one machine with NVLink, or leave the option out.",
            )
        )
    return True


def low_latency_sum(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """The sum over the ranks of the axis; one operator of a graph, whose kernel is chosen when it
    runs, by the bytes that there are."""
    found: torch.Tensor = torch.ops.autoshard.low_latency_sum(
        x.contiguous(), axis.size, axis.rank, axis.group
    )
    return found


_library = torch.library.Library("autoshard", "FRAGMENT")
_library.define("low_latency_sum(Tensor x, int n, int rank, str group) -> Tensor")


def _sum(x: torch.Tensor, n: int, rank: int, group: str) -> torch.Tensor:
    axis = Axis("", n, rank, group)
    if x.nbytes > MOST_BYTES or not x.nbytes:
        return all_reduce(x, "sum", axis)
    buffer, multicast = compat.symmetric_buffer(group, MOST_BYTES, x)
    kernel = kernel_of(x.nbytes, n, multicast)
    if kernel == "nccl":
        return all_reduce(x, "sum", axis)
    return compat.symmetric_sum(kernel, buffer, x, group)


_library.impl("low_latency_sum", _sum, "CUDA")


def _like(x: torch.Tensor, n: int, rank: int, group: str) -> torch.Tensor:
    return torch.empty_like(x)


torch.library.register_fake("autoshard::low_latency_sum", _like, lib=_library)
