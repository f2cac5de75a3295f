"""Transfers between neighbouring stages: activations forward, their gradients back."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from autoshard.runtime import compat
from autoshard.runtime.agreement import limit_group
from autoshard.runtime.collectives import Axis


class ValueMeta(NamedTuple):
    """A value that crosses a cut. graded: whether a gradient comes back for it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    graded: bool

    def empty(self, device: torch.device) -> torch.Tensor:
        """A place for it."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes of the value."""
        return self.dtype.itemsize * torch.Size(self.shape).numel()


class Channel(Protocol):
    """The transfers of one stage; messages between two stages arrive in the order of sending."""

    device: torch.device

    def send(self, to: int, values: Sequence[torch.Tensor], back: bool) -> None:
        """Send without waiting. back: gradients."""
        ...

    def receive(self, source: int, metas: Sequence[ValueMeta], back: bool) -> list[torch.Tensor]:
        """Wait for values that a stage sends."""
        ...

    def finish(self) -> None:
        """Wait until all that was sent is gone."""
        ...


class GroupChannel:
    """A channel over process groups: one for each direction.

    With one for both, a device that waits in a group's queue for what its neighbour sends would
    keep back what the neighbour waits for.
    """

    def __init__(self, axis: Axis, device: torch.device) -> None:
        self.rank, self.device = axis.rank, device
        self.groups: list[Any] = [compat.process_group(axis.group), _other_group(axis)]
        self.under_way: list[tuple[Any, torch.Tensor]] = []
        self.sent_bytes = 0

    def send(self, to: int, values: Sequence[torch.Tensor], back: bool) -> None:
        """See `Channel`."""
        self.under_way = [each for each in self.under_way if not each[0].is_completed()]
        for value in values:
            value = value.contiguous()
            self.sent_bytes += value.nbytes
            work = dist.isend(value, group=self.groups[back], group_dst=to)
            self.under_way.append((work, value))

    def receive(self, source: int, metas: Sequence[ValueMeta], back: bool) -> list[torch.Tensor]:
        """See `Channel`."""
        found = [meta.empty(self.device) for meta in metas]
        works = [dist.irecv(x, group=self.groups[back], group_src=source) for x in found]
        for work in works:
            self._wait(work, back)
        return found

    def finish(self) -> None:
        """See `Channel`."""
        for work, _ in self.under_way:
            self._wait(work, False)
        self.under_way.clear()

    def _wait(self, work: Any, back: bool) -> None:
        """Wait as long as collectives do: gloo's transfers take no limit from their group."""
        limit = compat.group_limit(self.groups[back]) if self.device.type == "cpu" else None
        if limit is None:
            work.wait()
        else:
            work.wait(timedelta(seconds=limit))


_others: dict[tuple[str, int], Any] = {}


def _other_group(axis: Axis) -> Any:
    """A second group of the ranks of an axis. Collective in the world at first."""
    key = axis.group, id(dist.group.WORLD)
    if key not in _others:
        ranks = dist.get_process_group_ranks(compat.process_group(axis.group))
        _others[key] = dist.new_group(ranks)
    limit_group(_others[key].group_name)
    return _others[key]
