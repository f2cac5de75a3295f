"""Process groups, their time limits and errors, and memory that the GPUs of a group reach of each
other: private parts of torch.distributed.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from autoshard.runtime.compat.modes import real_tensors

P = ParamSpec("P")
T = TypeVar("T")


def once_a_world(function: Callable[P, T]) -> Callable[P, T]:
    """`functools.cache` for what is true of the process group that runs now: with another one, or
    without one, nothing is known. Arguments are given by position.

    The group itself is compared and kept: its `id`, and the names of groups, may be those of a
    later one.
    """
    known: dict[Any, T] = {}
    of: Any = None

    @functools.wraps(function)
    def asked(*args: P.args, **kwargs: P.kwargs) -> T:
        nonlocal of
        if of is not (world := dist.group.WORLD):
            of = world
            known.clear()
        if args not in known:
            known[args] = function(*args, **kwargs)
        return known[args]

    return asked


@contextlib.contextmanager
def one_launch(group: Any) -> Iterator[None]:
    """What a group is asked to send and receive in here leaves at once, and has arrived after; of
    tensors, torch's public form (batch_isend_irecv) takes groups that it knows by name only."""
    group._start_coalescing()
    yield
    group._end_coalescing().wait()


def process_group(name: str) -> Any:
    """The process group of a name; torch's public functions take groups, its operators names."""
    from torch._C._distributed_c10d import _resolve_process_group

    return _resolve_process_group(name)  # type: ignore[arg-type]


def name_group(group: Any, name: str) -> str:
    """Let torch's operators find a group by another name, too. Returns the name by which they do:
    its own where another group has that name already."""
    from torch._C._distributed_c10d import _register_process_group

    try:
        found = process_group(name)
    except (RuntimeError, ValueError):  # nobody has it
        _register_process_group(name, group)  # type: ignore[arg-type]
        return name
    return name if found is group else str(group.group_name)


def replace_group(name: str, group: Any) -> None:
    """Let torch's operators find `group` by a name that another one has now. Graphs, compiled or
    not, look the name up at each collective."""
    from torch._C._distributed_c10d import _register_process_group, _unregister_process_group

    _unregister_process_group(name)  # type: ignore[arg-type]
    _register_process_group(name, group)  # type: ignore[arg-type]


_Group: Any = dist.ProcessGroup


class OwnSums(_Group):  # type: ignore[misc]
    """A stand-in for a process group of `size` ranks whose sums are the rank's own values, at once.

    Only all-reduces run on it. torch has no public function that makes the object which they
    return.
    """

    def allreduce(self, tensors: Any, *_: Any) -> Any:
        from torch._C._distributed_c10d import (  # type: ignore[attr-defined]
            _create_work_from_future,
        )

        done: Any = torch.futures.Future()
        done.set_result(tensors)
        return _create_work_from_future(done)

    allreduce_coalesced = allreduce


@once_a_world
def host_group(name: str) -> Any:
    """The process group of a name, where it sends what lies in the host's memory; else a new one of
    gloo, of the same ranks, all of which must ask for it at the same time."""
    group = process_group(name)
    if any(device.type == "cpu" for device in group._device_types):
        return group
    ranks = dist.get_process_group_ranks(group)
    return dist.new_group(ranks, backend="gloo", use_local_synchronization=True)


def group_limit(group: Any) -> float | None:
    """The seconds that a collective of the group may wait, the least of its devices; None where its
    backend does not say."""
    limits = []
    for device in getattr(group, "_device_types", ()):
        options = getattr(group._get_backend(torch.device(device)), "options", None)
        limit = getattr(options, "_timeout", None)
        if limit is not None:
            limits.append(limit.total_seconds())
    return min(limits, default=None)


def set_group_limit(group: Any, seconds: float) -> None:
    """Let collectives of the group wait that long.

    By a private function: groups that init_device_mesh makes have the default of torch, 30 minutes
    on gloo, whatever limit the world was started with.
    """
    c10d._set_pg_timeout(timedelta(seconds=seconds), group)


def is_done(work: Any, seconds: float) -> bool:
    """Whether a collective of gloo has ended, well or not, within the time: it goes on where not.
    Its wait says that the time is over by an error which only the state tells from its own."""
    with contextlib.suppress(RuntimeError):
        work.wait(timedelta(seconds=seconds))
    return bool(work.is_completed())


def is_of_a_collective(error: BaseException) -> bool:
    """Whether a collective raised the error; gloo raises plain RuntimeErrors."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and "gloo" in str(error)


def misses_a_rank(error: BaseException) -> bool:
    """Whether a collective ended because a rank did not come, or has gone."""
    return _is_late(error) or has_lost_a_rank(error)


def has_lost_a_rank(error: BaseException) -> bool:
    """Whether a collective ended because the connection to a rank was closed."""
    text = str(error).lower()
    return not _is_late(error) and ("connection" in text or "broken pipe" in text)


def _is_late(error: BaseException) -> bool:
    text = str(error).lower()
    return "timed out" in text or "timeout" in text


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
