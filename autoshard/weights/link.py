"""Processes that hand weights on to each other: connections of their own, and one decision for all
whether an update happens.

The connections are none of those that training or generating uses: where a process dies, the others
go on with theirs. An update is decided once, in the store: who has seen that all has arrived
everywhere says "commit", who has seen anything else says why not, and what is said first is the
decision of all. What each has read they tell each other over their connections before they swap, so
that a store which dies meanwhile, as that of a launcher does, leaves them with one decision: that
which any of them has read, else that nothing happens. What is not closed are two losses at once:
where the store dies and one of the processes that have read the decision too (rank 0 of `meet` is
both), those that are left may have read different things.
"""

import contextlib
import itertools
import json
import threading
import zlib
from collections.abc import Callable, Collection, Iterable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist

from autoshard.errors import AutoshardError
from autoshard.runtime import compat
from autoshard.runtime.agreement import Background, restarts

T = TypeVar("T")

_COMMIT = "commit"
_LOOK = 0.1  # seconds between looks at the decision


class Refused(AutoshardError):
    """An update that all processes know not to be possible, before anything has travelled."""


DEVICE_GROUPS = {"cuda": "ProcessGroupNCCL", "xpu": "ProcessGroupXCCL"}
"""Kind of device -> the group of torch.distributed whose connections take its tensors."""


def place_of(devices: Collection[torch.device]) -> tuple[str, str] | None:
    """The kind of a process's device and which one it is, where all of its tensors are on one that
    has a group in this torch."""
    device, *others = devices or [torch.device("cpu")]
    if others or not hasattr(dist, DEVICE_GROUPS.get(device.type, "")):
        return None
    properties = torch.get_device_module(device).get_device_properties(device)
    return device.type, str(getattr(properties, "uuid", device.index))


class Way:
    """Connections of one backend between the processes of a link. device: where it takes bytes."""

    def __init__(self, group: Any, device: torch.device) -> None:
        self._group, self.device = group, device

    def open(self) -> None:
        """Connect, all processes together: a round is of some of them."""
        self._group.allreduce([torch.zeros(1, device=self.device)]).wait()

    def exchange(
        self,
        arriving: Iterable[tuple[torch.Tensor, int]],
        leaving: Iterable[tuple[torch.Tensor, int]],
    ) -> None:
        """Receive bytes from some processes and send some, at once; those that leave may be packed
        as they are asked for."""
        if self.device.type == "cpu":
            works = [self._group.recv([data], sender, 0) for data, sender in arriving]
            works += [self._group.send([data], to, 0) for data, to in leaving]
            for work in works:
                work.wait()
            return
        packed = list(leaving)
        # one launch: a send that waited behind a receive would wait for its own answer
        with compat.one_launch(self._group):
            for data, sender in arriving:
                self._group.recv([data], sender, 0)
            for data, to in packed:
                self._group.send([data], to, 0)


class WeightLink:
    """The processes between which weights travel, as one of them sees them.

    store: what they meet at: any store of torch.distributed that all of them reach. rank, size:
    this process among them. name: of this link, where several use one store. timeout: seconds to
    wait for others, at the meeting and in an update.

    Collective over the processes. After a failed update in which something had travelled the link
    is closed, and its next update an error: the processes that are left make another one.
    """

    def __init__(
        self, store: Any, rank: int, size: int, *, name: str = "weights", timeout: float = 600.0
    ) -> None:
        self.rank, self.size, self.name = rank, size, name
        self.closed = ""
        self.plans: dict[str, Any] = {}  # of the last layouts: an update a step has the same
        self._updates = 0
        limit = timedelta(seconds=timeout)
        self._store = dist.PrefixStore(f"autoshard/{name}", store)
        try:
            self._group: Any = dist.ProcessGroupGloo(self._store, rank, size, limit)
        except RuntimeError as error:
            raise AutoshardError(
                f"rank {rank} of {size} has not met the others of {name!r}: {error}",
                remedy="Start all of them, with the same address, size and name.",
            ) from error
        self._host = Way(self._group, torch.device("cpu"))
        self._ways: dict[torch.device, Way] = {}

    def gather(self, value: Any) -> list[Any]:
        """The values that all processes gave, anything that JSON holds, in their order."""
        octets = zlib.compress(json.dumps(value).encode(), 1)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        self._group.allgather([sizes], [torch.tensor([len(octets)])]).wait()
        padded = torch.zeros(max(int(size) for size in sizes), dtype=torch.uint8)
        padded[: len(octets)] = torch.frombuffer(bytearray(octets), dtype=torch.uint8)
        told = [torch.empty_like(padded) for _ in range(self.size)]
        self._group.allgather([told], [padded]).wait()
        each = zip(told, sizes, strict=True)
        return [json.loads(zlib.decompress(bytes(one[: int(n)].numpy()))) for one, n in each]

    def agree(self, errors: Sequence[str | None]) -> None:
        """Raise on every process where one gave an error. Nothing has travelled: the link stays."""
        for rank, error in enumerate(errors):
            if error is not None:
                raise Refused(error if rank == self.rank else f"rank {rank}: {error}")

    def way(self, places: Sequence[Sequence[str] | None], devices: Collection[torch.device]) -> Way:
        """How slices travel, alike on all processes. places: what `place_of` said on each: where
        all tensors are on devices of one kind, one a process, for which torch has a group, they
        stay there; else they go through the host. devices: of this process."""
        known = [tuple(place) for place in places if place]
        if len(set(known)) < self.size or len({kind for kind, _ in known}) > 1:
            return self._host
        (device,) = devices
        if device not in self._ways:
            make = getattr(dist, DEVICE_GROUPS[device.type])
            store = dist.PrefixStore(device.type, self._store)
            self._ways[device] = Way(make(store, self.rank, self.size), device)
            self._ways[device].open()
        return self._ways[device]

    def begin(self) -> None:
        """The beginning of an update."""
        if self.closed:
            raise AutoshardError(
                f"the link {self.name!r} is closed since an update failed: {self.closed}",
                remedy="Have the processes that are left make another link.",
            )
        self._updates += 1

    def settle(self) -> None:
        """The update is done, where all others come here too: return, or raise as they do."""
        read = self._read(_COMMIT)
        with contextlib.suppress(RuntimeError):  # one is lost: the store tells the others
            heard = self.gather(read)
            read = next((one for one in heard if one == _COMMIT), read)
        self._end(read)

    def decide(self, why_not: str) -> None:
        """The update does not happen, unless that is decided already: return where it is done,
        raise where it is not, the same on all processes."""
        self._end(self._read(f"rank {self.rank}: {why_not}"))

    def _read(self, said: str) -> str | None:
        """What is decided, by this process where nobody has yet; None where the store is lost."""
        try:
            found: str = self._store.compare_set(f"decision/{self._updates}", "", said).decode()
        except RuntimeError:
            return None
        return found

    def _end(self, decided: str | None) -> None:
        if decided == _COMMIT:
            return
        if decided is None:
            decided = "the store with the decision is lost"
            self._group.abort()  # those that wait for this process cannot read that it is gone
        self.closed = decided
        raise AutoshardError(
            f"update {self._updates} of {self.name!r} did not happen, and the weights of "
            f"before are whole: {self.closed}",
            remedy="See the output of that process. Those that are left make another link.",
        )

    def aborted(self, arrived: bool) -> bool:
        """Whether a process has said that the update does not happen, or nobody can say. arrived:
        all is here, so that others may have read that the update is done: they will tell."""
        key = f"decision/{self._updates}"
        try:
            return self._store.check([key]) and self._store.get(key).decode() != _COMMIT
        except RuntimeError:
            return not arrived


class Together(Generic[T]):
    """Work that all processes of a link do together, in a thread of each: done by all or by none.

    The thread may be left waiting for a process that is lost; it changes nothing any more.
    """

    def __init__(self, link: WeightLink, work: Callable[[], T]) -> None:
        self._link, self._work = link, work
        self._found: list[T] = []
        self._error: BaseException | None = None
        link.begin()
        self._thread = Background("update", self._run)

    @property
    def done(self) -> bool:
        """Whether `wait` returns, or raises, at once."""
        return not self._thread.is_alive()

    def wait(self) -> T:
        """What the work returned here. Raises on all processes where one raised or is lost."""
        try:
            while not self.done:
                self._thread.join(_LOOK)
                if not self.done and self._link.aborted(bool(self._found)):
                    self._link.decide("it is aborted")
        except AutoshardError:
            raise
        except BaseException as error:  # the user's, who stops this process
            self._link.decide(f"{type(error).__name__}: {error}")
            raise
        if self._error is not None:
            raise self._error
        return self._found[0]

    def _run(self, _: threading.Event) -> None:
        try:
            self._found.append(self._work())
            self._link.gather("all has arrived")
        except Refused as error:
            self._error = error
        except BaseException as error:
            self._end(partial(self._link.decide, f"{type(error).__name__}: {error}"), error)
        else:
            self._end(self._link.settle, None)

    def _end(self, decide: Callable[[], None], cause: BaseException | None) -> None:
        try:
            decide()
        except AutoshardError as error:
            error.__cause__ = cause
            self._error = error


def meet(
    address: str, rank: int, size: int, *, name: str = "weights", timeout: float = 600.0
) -> WeightLink:
    """A link of processes of several worlds: `size` of them, numbered from 0, meet at an address,
    "host:port", at which rank 0 listens."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise AutoshardError(
            f"{address!r} is no address", remedy='Give "host:port", such as "node3:29400".'
        )
    limit = timedelta(seconds=timeout)
    store = dist.TCPStore(
        host, int(port), is_master=rank == 0, timeout=limit, wait_for_workers=False
    )
    return WeightLink(store, rank, size, name=name, timeout=timeout)


_count = itertools.count()


@compat.once_a_world
def _links() -> list[WeightLink]:
    return []


def world_link() -> WeightLink:
    """The link of all processes of the running world, made at its first update. Collective."""
    if not dist.is_initialized():
        return WeightLink(dist.HashStore(), 0, 1)
    made = _links()
    if not made or made[-1].closed:
        world = dist.group.WORLD
        assert world is not None
        rank, size = dist.get_rank(), dist.get_world_size()
        # a store may outlive a world, and its processes, and hold what they said
        name = f"world {restarts()}.{next(_count)}"
        made.append(WeightLink(world.get_group_store(), rank, size, name=name))
    return made[-1]
