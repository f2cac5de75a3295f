"""Run every rank of an axis in one process: threads that meet at each collective.

The same rewritten graph and the same collectives run with no process group, which makes
`Program.verify`, the rule oracle and most tests one-process affairs. A rank that fails, or that
calls another collective than its peers, fails all of them: never a hang.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from autoshard.runtime.axis import Axis

T = TypeVar("T")

PREFIX = "lockstep:"
_meetings: dict[str, _Meeting] = {}
_ids = itertools.count()


class _Meeting:
    """Where the threads of one run exchange their tensors."""

    def __init__(self, n: int, timeout: float) -> None:
        self.barrier = threading.Barrier(n, timeout=timeout)
        self.slots: list[Any] = [None] * n

    def exchange(self, rank: int, label: str, tensor: torch.Tensor) -> list[torch.Tensor]:
        self.slots[rank] = (label, tensor.detach())
        self.barrier.wait()
        slots = list(self.slots)
        self.barrier.wait()  # nobody may overwrite a slot before everybody has read it
        labels = [slot[0] for slot in slots]
        if len(set(labels)) > 1:
            raise RuntimeError(f"ranks disagree on the collective to run: {labels}")
        return [slot[1] for slot in slots]


def exchange(axis: Axis, label: str, tensor: torch.Tensor) -> list[torch.Tensor]:
    """All ranks' tensors, in the order of ranks; `label` must be the same on every rank."""
    return _meetings[axis.group].exchange(axis.rank, label, tensor)


def run_ranks(
    n: int,
    fn: Callable[..., T],
    *,
    name: str = "tp",
    timeout: float = 60,
    prepare: Callable[[Axis], Any] | None = None,
) -> list[T]:
    """Call `fn(axis)` once a rank, in `n` threads, and return the results in rank order.

    prepare: called as prepare(axis) for each rank before any thread starts; fn is then called as
    fn(axis, prepared). For what is not thread-safe, such as everything with fake tensors.

    Autograd works inside `fn` (CPU backward runs in the calling thread). Raises the first
    rank's own error; ranks that were only waiting for it are not reported.
    """
    group = f"{PREFIX}{next(_ids)}"
    meeting = _meetings[group] = _Meeting(n, timeout)
    results: list[Any] = [None] * n
    errors: list[BaseException | None] = [None] * n
    grad_mode = torch.is_grad_enabled()
    axes = [Axis(name, n, rank, group) for rank in range(n)]
    prepared = [(prepare(axis),) if prepare else () for axis in axes]

    def work(rank: int) -> None:
        try:
            with torch.set_grad_enabled(grad_mode):
                results[rank] = fn(axes[rank], *prepared[rank])
        except BaseException as error:  # re-raised below, in the caller's thread
            errors[rank] = error
            meeting.barrier.abort()

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    del _meetings[group]
    failed = [error for error in errors if error is not None]
    own = [error for error in failed if not isinstance(error, threading.BrokenBarrierError)]
    if failed:
        raise (own or failed)[0]
    return results
