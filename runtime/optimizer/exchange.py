"""Parts of matrices travel to the ranks that own them, and what these made travels back.

One all-to-all a direction and bucket, of bytes, so that dtypes mix. What a rank keeps is copied.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autoshard.runtime import compat
from autoshard.runtime.agreement import limit_group
from autoshard.runtime.collectives import Axis, I, State, shard_dim
from autoshard.runtime.mesh import axes_of
from autoshard.runtime.parameters import local_bounds

_ALIGNED = 8  # bytes: each piece of a message begins where a tensor of any dtype may


@dataclass(frozen=True)
class Sharers:
    """The ranks that hold parts or copies of a parameter: all of its mesh; of one that is at home
    on a rank of pp, those of its stage.

    ranks: of the world. axes: of each its place on the axes. own: the place of this rank among
    them; None: it is none of them. group: None where one rank is alone.
    """

    ranks: tuple[int, ...]
    axes: tuple[tuple[Axis, ...], ...]
    own: int | None
    group: Any

    def bounds(self, shape: torch.Size, states: Mapping[str, State]) -> list[list[tuple[int, int]]]:
        """Of each rank's part, the first index and one past the last."""
        return [local_bounds(shape, states, axes) for axes in self.axes]

    def senders(self, states: Mapping[str, State], owner: int) -> list[int]:
        """The ranks whose parts make the whole: of copies those nearest to the owner."""
        split = {name for name, state in states.items() if shard_dim(state) is not None}
        return [
            number
            for number, axes in enumerate(self.axes)
            if all(a.rank == o.rank or a.name in split for a, o in zip(axes, self.axes[owner]))
        ]


@compat.once_a_world
def sharers_of(mesh: DeviceMesh, home: int | None) -> Sharers:
    """The sharers of what is stored on a mesh. Collective among them at the first call."""
    axes = axes_of(mesh)
    apart = [axis.name == "pp" and home is not None for axis in axes]
    places = itertools.product(
        *(
            range(axis.size) if home is None or not alone else (home,)
            for axis, alone in zip(axes, apart)
        )
    )
    at = [tuple(place) for place in places]
    ranks = tuple(int(mesh.mesh[place]) for place in at)
    placed = tuple(
        tuple(axis._replace(rank=rank) for axis, rank in zip(axes, place)) for place in at
    )
    here = tuple(axis.rank for axis in axes)
    own = at.index(here) if here in at else None  # type: ignore[arg-type]
    group = None
    if own is not None and len(ranks) > 1:
        group = _group(ranks, [axis for axis, alone in zip(axes, apart) if not alone])
    return Sharers(ranks, placed, own, group)


def _group(ranks: Sequence[int], axes: Sequence[Axis]) -> Any:
    several = [axis for axis in axes if axis.size > 1]
    if len(several) == 1:
        return compat.process_group(several[0].group)
    if len(ranks) == dist.get_world_size():
        return dist.group.WORLD
    group = dist.new_group(list(ranks), use_local_synchronization=True)
    limit_group(str(group.group_name))
    return group


@dataclass
class Message:
    """Parts that travel from some of the sharers to some others.

    legs: of each part its sender, its receiver, its shape and dtype; on the sender `make` gives it,
    on the receiver `take` is given it.
    """

    sharers: Sharers
    device: torch.device

    def __post_init__(self) -> None:
        count = len(self.sharers.ranks)
        self._leaving: list[list[torch.Tensor]] = [[] for _ in range(count)]
        self._arriving: list[list[tuple[Sequence[int], torch.dtype, Any]]] = [
            [] for _ in range(count)
        ]
        self.sent = 0
        self._received: torch.Tensor | None = None
        self._work: Any = None

    def add(
        self,
        sender: int,
        receiver: int,
        shape: Sequence[int],
        dtype: torch.dtype,
        make: Callable[[], torch.Tensor],
        take: Callable[[torch.Tensor], Any],
    ) -> None:
        """One part; in the same order on every rank."""
        own = self.sharers.own
        if math.prod(shape) == 0:
            return
        if sender == receiver == own:
            take(make())
        elif sender == own:
            piece = make().contiguous().view(-1).view(torch.uint8)
            self.sent += piece.numel()
            self._leaving[receiver].append(_padded(piece))
        elif receiver == own:
            self._arriving[sender].append((shape, dtype, take))

    def start(self) -> None:
        """Send what this rank has, without waiting."""
        if self.sharers.group is None:
            return
        own = self.sharers.own
        assert own is not None
        # to itself a rank sends a piece of nothing: not every backend takes an empty message
        self._leaving[own] = [torch.zeros(_ALIGNED, dtype=torch.uint8, device=self.device)]
        out = [sum(piece.numel() for piece in pieces) for pieces in self._leaving]
        into = [sum(_space(s, d) for s, d, _ in parts) for parts in self._arriving]
        into[own] = _ALIGNED
        sent = torch.cat([piece for pieces in self._leaving for piece in pieces])
        self._received = torch.empty(sum(into), dtype=torch.uint8, device=self.device)
        self._work = dist.all_to_all_single(
            self._received, sent, into, out, group=self.sharers.group, async_op=True
        )
        self._leaving = [[sent]]  # until it has left

    def finish(self) -> None:
        """Wait for what comes, and give it to those who take it."""
        if self._received is None:
            return
        self._work.wait()
        at = 0
        for sender, parts in enumerate(self._arriving):
            at += _ALIGNED if sender == self.sharers.own else 0
            for shape, dtype, take in parts:
                nbytes = math.prod(shape) * dtype.itemsize
                take(self._received[at : at + nbytes].view(dtype).view(tuple(shape)))
                at += _space(shape, dtype)
        self._received = self._work = None
        self._leaving = []


def _space(shape: Sequence[int], dtype: torch.dtype) -> int:
    return -(-math.prod(shape) * dtype.itemsize // _ALIGNED) * _ALIGNED


def _padded(piece: torch.Tensor) -> torch.Tensor:
    missing = -piece.numel() % _ALIGNED
    return torch.cat([piece, piece.new_zeros(missing)]) if missing else piece


def unsplit_states(states: Mapping[str, State]) -> dict[str, State]:
    """The states of a parameter among its sharers: on pp all of them are at its home."""
    return {n: (s if shard_dim(s) is not None else I) for n, s in states.items()}
