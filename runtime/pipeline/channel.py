"""Transfers between neighbouring stages: activations forward, their gradients back."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from autoshard.runtime import compat
from autoshard.runtime.agreement import limit_group
from autoshard.runtime.collectives import Axis


class ValueMeta(NamedTuple):
    """A value that crosses a cut. graded: whether a gradient comes back for it. line: of the user's
    code that makes it, for errors."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    graded: bool
    line: str | None = None

    def empty(self, device: torch.device) -> torch.Tensor:
        """A place for it."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes of the value."""
        return self.dtype.itemsize * torch.Size(self.shape).numel()


class GroupChannel:
    """The transfers of one rank over process groups, one for each direction; messages between two
    ranks in one direction, forward or back, arrive in the order of sending.

    With one for both, a device that waits in a group's queue for what its neighbour sends would
    keep back what the neighbour waits for. So what goes around, from the last rank to the first,
    has groups of its own: of two ranks it meets what goes straight on. all_groups: the ranks of
    every group of the axis. around: whether anything goes around.
    """

    def __init__(
        self,
        axis: Axis,
        device: torch.device,
        all_groups: tuple[tuple[int, ...], ...],
        around: bool = False,
    ) -> None:
        self.rank, self.device = axis.rank, device
        made = [_other_group(axis.group, all_groups, i) for i in range(3 if around else 1)]
        for group in made:
            limit_group(group.group_name)
        first, *others = made
        self.groups: list[Any] = [compat.process_group(axis.group), first]
        self.groups += others or self.groups
        self.under_way: list[tuple[Any, torch.Tensor]] = []
        self.sent_bytes = 0

    def send(self, to: int, values: Sequence[torch.Tensor], back: bool) -> None:
        """Send without waiting. back: gradients."""
        self._free_sent()
        for value in values:
            value = value.contiguous()
            self.sent_bytes += value.nbytes
            work = dist.isend(value, group=self._group(self.rank, to, back), group_dst=to)
            self.under_way.append((work, value))

    def receive(self, source: int, metas: Sequence[ValueMeta], back: bool) -> list[torch.Tensor]:
        """Wait for values that a stage sends."""
        found = [meta.empty(self.device) for meta in metas]
        group = self._group(source, self.rank, back)
        try:
            works = [dist.irecv(x, group=group, group_src=source) for x in found]
            for work in works:
                self._wait(work)
        except RuntimeError as error:
            what = "gradients of the values" if back else "the values"
            error.add_note(f"a receive of {what} of {metas[0].line}, from place {source} of pp")
            raise
        self._free_sent()
        return found

    def finish(self) -> None:
        """Wait until all that was sent is gone."""
        for work, _ in self.under_way:
            self._wait(work)
        self.under_way.clear()

    def _free_sent(self) -> None:
        self.under_way = [each for each in self.under_way if not each[0].is_completed()]

    def _group(self, source: int, to: int, back: bool) -> Any:
        around = to > source if back else to < source
        return self.groups[2 * around + back]

    def _wait(self, work: Any) -> None:
        """Wait as long as collectives do: gloo's transfers take no limit from their group."""
        limit = compat.group_limit(self.groups[0]) if self.device.type == "cpu" else None
        if limit is None:
            work.wait()
        else:
            work.wait(timedelta(seconds=limit))


@compat.once_a_world
def _other_group(own: str, all_groups: tuple[tuple[int, ...], ...], number: int) -> Any:
    """Another group of the ranks of the group `own`, which is one of all. Collective in the world
    at first."""
    ranks = dist.get_process_group_ranks(compat.process_group(own))
    made = [dist.new_group(list(one)) for one in all_groups]
    return made[all_groups.index(tuple(ranks))]
