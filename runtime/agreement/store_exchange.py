"""Messages between ranks through the process group's store, which nobody waits for without end.

A collective that one rank does not enter holds the others for as long as the process group allows.
Here a waiting rank looks for the missing one. That it failed, has ended, waits for something else,
or is over the time limit is an error at once, and the end of all exchanges in this world: once one
rank has failed, nobody knows which collectives the others have entered.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch.distributed as dist

DEFAULT_LIMIT = 600.0
_ENDED, _WAITS = "ended", "waits"
_LOOK = 0.2  # seconds between looks at where the missing ranks are


class PeerFailed(Exception):
    """The first failure of a world: on which rank, and what happened there."""

    def __init__(self, rank: int, story: str) -> None:
        super().__init__(rank, story)
        self.rank, self.story = rank, story


class StoreExchange:
    """The messages of one process group world, as one rank writes and reads them.

    Every rank of a group must make the same exchanges in the same order. limit: how many seconds
    a rank waits for the others. failure: rank and story of the world's first failure, where this
    rank knows of one.
    """

    def __init__(self, world: Any, generation: int) -> None:
        self.world, self.rank = world, dist.get_rank()
        self.limit = DEFAULT_LIMIT
        self.failure: tuple[int, str] | None = None
        self._prefix = f"autoshard/{generation}"
        self._store: Any = world.get_group_store()
        self._counts: dict[str, int] = {}

    def exchange(self, value: Any, what: str, members: Sequence[int]) -> list[Any]:
        """The values that the members gave, in their order; `value` is anything that JSON holds.

        what: where this rank is, for the errors of others. Raises PeerFailed where a member will
        not come, or has not come within `limit` seconds, and after any failure that this rank
        knows of.
        """
        if self.failure is not None:
            raise PeerFailed(*self.failure)
        name = hashlib.sha256(repr(tuple(members)).encode()).hexdigest()[:12]
        count = self._counts[name] = self._counts.get(name, 0) + 1
        here = {"name": name, "count": count, "members": list(members), "what": what}
        self._put(self._slot(name, count, self.rank), value)
        self._put(self._place(self.rank), {"state": _WAITS, **here})
        given = self._collect(name, count, members)
        given[self.rank] = value
        if count > 1:  # whoever wrote this one has read the one before
            self._store.delete_key(self._slot(name, count - 1, self.rank))
        return [given[member] for member in members]

    def fail(self, rank: int, story: str) -> PeerFailed:
        """The world's first failure, which is this one where no rank has told of another."""
        if self.failure is None:
            # sets the key where there is none, and returns what it holds
            text = self._store.compare_set(self._failed, "", json.dumps([rank, story]))
            rank, story = json.loads(text)
            self.failure = rank, story
        return PeerFailed(*self.failure)

    def leave(self) -> None:
        """Tell whoever waits, now or later, that this process has ended."""
        try:
            self._put(self._place(self.rank), {"state": _ENDED})
        except Exception:  # the store is gone, and so are those who would read it
            return

    def _collect(self, name: str, count: int, members: Sequence[int]) -> dict[int, Any]:
        slots = {m: self._slot(name, count, m) for m in members if m != self.rank}
        started = looked = time.monotonic()
        pause = 0.0005
        while True:
            # one question for all of them; whom it is that one waits for, only now and then
            if self._store.check(list(slots.values())):
                return self._read(slots)
            now = time.monotonic()
            if now - looked > _LOOK * max(1, len(slots) / 8):
                looked = now
                self._look(name, slots)
            if now - started > self.limit:
                late = next((m for m, slot in slots.items() if not self._has(slot)), None)
                if late is not None:
                    raise self.fail(
                        late,
                        f"did not arrive within {self.limit:g} seconds; it is elsewhere, or "
                        "slower: ranks whose batches differ in shape, or that take different "
                        "branches, run different graphs",
                    )
            time.sleep(pause)
            pause = min(1.5 * pause, 0.05)

    def _look(self, name: str, slots: dict[int, str]) -> None:
        """Raise PeerFailed where a rank will not come to where this one waits."""
        failed = self._has(self._failed)
        places = {} if failed else {member: self._where(member, name) for member in slots}
        # asked after the look: what a rank gave before it failed is given
        missing = [member for member, slot in slots.items() if not self._has(slot)]
        if failed and missing:
            self.failure = tuple(json.loads(self._store.get(self._failed)))
            raise PeerFailed(*self.failure)
        for member in missing:
            if (story := places.get(member)) is not None:
                raise self.fail(member, story)

    def _where(self, member: int, name: str) -> str | None:
        """Why a rank will not come to the exchanges of the group `name`; None where it may."""
        if not self._has(self._place(member)):
            return None
        place = json.loads(self._store.get(self._place(member)))
        if place["state"] == _ENDED:
            return "has ended"
        waits_for_me = (
            place["name"] != name
            and self.rank in place["members"]
            and place["count"] > self._counts.get(place["name"], 0)
        )
        return f"is elsewhere: {place['what']}" if waits_for_me else None

    def _read(self, slots: dict[int, str]) -> dict[int, Any]:
        if self._store.has_extended_api():
            texts = self._store.multi_get(list(slots.values()))
        else:
            texts = [self._store.get(slot) for slot in slots.values()]
        return {member: json.loads(text) for member, text in zip(slots, texts)}

    def _has(self, key: str) -> bool:
        return bool(self._store.check([key]))

    @property
    def _failed(self) -> str:
        return f"{self._prefix}/failed"

    def _place(self, rank: int) -> str:
        return f"{self._prefix}/at/{rank}"

    def _slot(self, name: str, count: int, rank: int) -> str:
        return f"{self._prefix}/{name}/{count}/{rank}"

    def _put(self, key: str, value: Any) -> None:
        self._store.set(key, json.dumps(value))


class _Worlds(NamedTuple):
    """The exchange of the present world, and how many worlds there have been."""

    exchange: StoreExchange | None
    generation: int


_current = _Worlds(None, 0)


def current_exchange() -> StoreExchange | None:
    """The exchange of the running world; None where there is none, or nobody else in it.

    Ranks count the worlds they have been in, so that a store which outlives one holds no old
    message for the next.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1 or dist.get_backend() == "fake":
        return None
    if _current.exchange is None or _current.exchange.world is not dist.group.WORLD:
        _renew()
    return _current.exchange


def _renew() -> None:
    global _current
    if _current.exchange is None:
        atexit.register(_leave)
    made = StoreExchange(dist.group.WORLD, _current.generation)
    _current = _Worlds(made, _current.generation + 1)


def _leave() -> None:
    if _current.exchange is not None and dist.is_initialized():
        _current.exchange.leave()
