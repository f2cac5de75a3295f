"""Run every rank of a mesh in one process: threads that meet at each collective.

The same rewritten graph and the same collectives run with no process group, which makes
`verify_program`, the rule oracle and most tests one-process affairs. A rank that fails, or that
calls another collective than its peers, fails all of them: never a hang.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from autoshard.runtime.collectives.axis import Axis

T = TypeVar("T")

PREFIX = "lockstep:"
_meetings: dict[str, _Meeting] = {}
_ids = itertools.count()


class _Meeting:
    """The meeting point of a run, at which its threads exchange tensors."""

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
    timeout: float = 60,
    prepare: Callable[[Axis], Any] | None = None,
) -> list[T]:
    """`run_mesh` on a tp axis of n ranks: fn and prepare get the axis."""
    made = None if prepare is None else lambda axes: prepare(axes[0])
    return run_mesh({"tp": n}, lambda axes, *rest: fn(axes[0], *rest), timeout, made)


def run_mesh(
    sizes: Mapping[str, int],
    fn: Callable[..., T],
    timeout: float = 60,
    prepare: Callable[[tuple[Axis, ...]], Any] | None = None,
) -> list[T]:
    """Call `fn(axes)` once a rank of the mesh, each in a thread; the results in rank order.

    sizes: by axis name, outermost first; the last axis varies fastest, as in a DeviceMesh.
    prepare: called as prepare(axes) for each rank before any thread starts; fn is then called as
    fn(axes, prepared). For what is not thread-safe, such as everything with fake tensors.

    Autograd works inside `fn` (CPU backward runs in the calling thread). Raises the first
    rank's own error; ranks that were only waiting for it are not reported.
    """
    run = next(_ids)
    coordinates = list(itertools.product(*map(range, sizes.values())))
    meshes = [_axes(sizes, coordinate, run) for coordinate in coordinates]
    meetings = {axis.group: _Meeting(axis.size, timeout) for axes in meshes for axis in axes}
    _meetings.update(meetings)
    results: list[Any] = [None] * len(meshes)
    errors: list[BaseException | None] = [None] * len(meshes)
    grad_mode = torch.is_grad_enabled()
    prepared = [(prepare(axes),) if prepare else () for axes in meshes]

    def work(rank: int) -> None:
        try:
            with torch.set_grad_enabled(grad_mode):
                results[rank] = fn(meshes[rank], *prepared[rank])
        except BaseException as error:  # re-raised below, in the caller's thread
            errors[rank] = error
            for meeting in meetings.values():
                meeting.barrier.abort()

    threads = [
        threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(len(meshes))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for group in meetings:
        del _meetings[group]
    failed = [error for error in errors if error is not None]
    own = [error for error in failed if not isinstance(error, threading.BrokenBarrierError)]
    if failed:
        raise (own or failed)[0]
    return results


def _axes(sizes: Mapping[str, int], coordinate: Sequence[int], run: int) -> tuple[Axis, ...]:
    """The axes of one rank; a group is named by the coordinates its ranks have in common."""
    axes = []
    for position, (name, size) in enumerate(sizes.items()):
        line = [*coordinate[:position], "x", *coordinate[position + 1 :]]
        group = f"{PREFIX}{run}:{'.'.join(map(str, line))}"
        axes.append(Axis(name, size, coordinate[position], group))
    return tuple(axes)
