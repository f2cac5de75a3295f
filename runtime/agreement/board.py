"""Messages between ranks that nobody waits for without end: a board in the process group's store.

A collective that one rank does not enter holds the others for as long as the process group allows.
Here a rank that waits looks at where the missing one is: failed, gone, or waiting for another
thing, which would wait for ever; all of these, and the time limit, are errors at once.
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
_FAILED, _GONE, _WAITS = "failed", "gone", "waits"
_LOOK = 0.2  # seconds between looks at where the missing ranks are


class Failure(NamedTuple):
    """A failed attempt: the rank it began on, which of that rank's failures it is (from 1; 0: the
    rank itself did not tell), what happened, and the ranks that learned of it as it happened."""

    origin: int
    serial: int
    story: str
    known_to: list[int]


class Absent(Exception):
    """A rank will not answer, or did not in time; see `failure`. attempt: which one of that rank
    failed, where it is known."""

    def __init__(self, failure: Failure, attempt: int = 0) -> None:
        super().__init__(failure.origin, failure.story)
        self.failure, self.attempt = failure, attempt


class Board:
    """The messages of one process group world, as one rank writes and reads them.

    Every rank of a group must make the same exchanges in the same order. The failure of an old
    attempt must not be taken for a new one: attempt counts the tries (compilations) this rank has
    begun, and of each failure a rank remembers that it has heard. A rank that failed alone may
    have begun more tries than the others, so whenever ranks meet, or hear of a failure, they go on
    from the highest count among them (L. Lamport, "Time, Clocks, and the Ordering of Events in a
    Distributed System", 1978).
    """

    def __init__(self, world: Any, generation: int) -> None:
        self.world, self.rank = world, dist.get_rank()
        self.limit = DEFAULT_LIMIT
        self.attempt = 0
        self.trying = False
        self._prefix = f"autoshard/{generation}"
        self._store: Any = world.get_group_store()
        self._counts: dict[str, int] = {}
        self._failures = 0
        self._heard: dict[int, int] = {}  # origin -> the last serial

    def exchange(self, value: Any, what: str, members: Sequence[int]) -> list[Any]:
        """What every member gave, in their order; `value` is anything that JSON holds.

        what: where this rank is, for the errors of others. Raises Absent where a member will not
        come, or has not come within `limit` seconds.
        """
        name = hashlib.sha256(repr(tuple(members)).encode()).hexdigest()[:12]
        count = self._counts[name] = self._counts.get(name, 0) + 1
        here = {"name": name, "count": count, "members": list(members), "what": what}
        self._put(self._slot(name, count, self.rank), [self.attempt, value])
        self._say(_WAITS, **here)
        try:
            got = self._collect(name, count, members)
        except Absent:
            self._counts[name] = count - 1  # the absent one never entered it
            # withdrawn, not deleted: a rank that has seen it may be about to read it
            self._put(self._slot(name, count, self.rank), None)
            raise
        self.attempt = max([self.attempt, *(attempt for attempt, _ in got.values())])
        found = {member: given for member, (_, given) in got.items()}
        found[self.rank] = value
        if count > 1:  # whoever wrote this one has read the one before
            self._store.delete_key(self._slot(name, count - 1, self.rank))
        return [found[member] for member in members]

    def failure(self, story: str, known_to: Sequence[int] = ()) -> Failure:
        """A failure that begins on this rank."""
        self._failures += 1
        return Failure(self.rank, self._failures, story, list(known_to))

    def fail(self, failure: Failure) -> None:
        """Tell whoever waits for this rank that its attempt failed."""
        self._say(_FAILED, failure=failure)

    def leave(self) -> None:
        """Tell whoever waits, now or later, that this process has ended."""
        try:
            self._say(_GONE)
        except Exception:  # the store is gone, and so are those who would read it
            return

    def _collect(self, name: str, count: int, members: Sequence[int]) -> dict[int, Any]:
        others = [member for member in members if member != self.rank]
        started = looked = time.monotonic()
        pause = 0.0005
        while True:
            # one question for all of them; whom it is that one waits for, only now and then
            if self._store.check([self._slot(name, count, member) for member in others]):
                got = self._read(name, count, others)
                if len(got) == len(others):
                    return got
            now = time.monotonic()
            if now - looked > _LOOK * max(1, len(others) / 8):
                looked = now
                for member in others:
                    absent = self._look(member, name)
                    # asked after the look: what a rank gave before it failed is given
                    if absent is not None and not self._gave(member, name, count):
                        self._hear(absent)
                        raise absent
            if now - started > self.limit:
                late = [m for m in others if not self._gave(m, name, count)] or others
                raise _absent(
                    late[0],
                    f"did not arrive within {self.limit:g} seconds; it is elsewhere, or slower: "
                    "ranks whose batches differ in shape, or that take different branches, run "
                    "different graphs",
                )
            time.sleep(pause)
            pause = min(1.5 * pause, 0.05)

    def _gave(self, member: int, name: str, count: int) -> bool:
        slot = self._slot(name, count, member)
        return bool(self._store.check([slot])) and bool(self._read(name, count, [member]))

    def _read(self, name: str, count: int, members: Sequence[int]) -> dict[int, Any]:
        slots = [self._slot(name, count, member) for member in members]
        if self._store.has_extended_api():
            texts = self._store.multi_get(slots)
        else:
            texts = [self._store.get(slot) for slot in slots]
        given = {member: json.loads(text) for member, text in zip(members, texts)}
        return {member: value for member, value in given.items() if value is not None}

    def _look(self, member: int, name: str) -> Absent | None:
        """Why `member`, unless it has come already, will not come to where this rank waits; None
        where it may come."""
        key = f"{self._prefix}/at/{member}"
        if not self._store.check([key]):
            return None
        at = json.loads(self._store.get(key))
        if at["state"] == _GONE:
            return _absent(member, "has ended")
        if at["state"] == _FAILED:
            failure = Failure(*at["failure"])
            new = at["attempt"] >= self.attempt if self.trying else at["attempt"] > self.attempt
            heard = failure.serial and failure.serial <= self._heard.get(failure.origin, 0)
            if new and not heard and self.rank not in (failure.origin, *failure.known_to):
                return Absent(failure, at["attempt"])
        elif (
            at["name"] != name
            and self.rank in at["members"]
            and at["count"] > self._counts.get(at["name"], 0)
        ):
            # it waits for this rank there, and this rank for it here
            return _absent(member, f"is elsewhere: {at['what']}")
        return None

    def _hear(self, absent: Absent) -> None:
        failure = absent.failure
        self.attempt = max(self.attempt, absent.attempt)
        if failure.serial:
            self._heard[failure.origin] = max(
                failure.serial, self._heard.get(failure.origin, 0)
            )

    def _say(self, state: str, **more: Any) -> None:
        self._put(
            f"{self._prefix}/at/{self.rank}", {"state": state, "attempt": self.attempt, **more}
        )

    def _slot(self, name: str, count: int, rank: int) -> str:
        return f"{self._prefix}/{name}/{count}/{rank}"

    def _put(self, key: str, value: Any) -> None:
        self._store.set(key, json.dumps(value))


def _absent(rank: int, story: str) -> Absent:
    return Absent(Failure(rank, 0, story, []))


class _Worlds(NamedTuple):
    """The board of the present world, and how many worlds there have been."""

    board: Board | None
    generation: int


_current = _Worlds(None, 0)


def board() -> Board | None:
    """The board of the running world; None where there is none, or nobody else in it.

    Ranks count the worlds they have been in, so that a store which outlives one holds no old
    message for the next.
    """
    global _current
    if not dist.is_initialized() or dist.get_world_size() == 1 or dist.get_backend() == "fake":
        return None
    world = dist.group.WORLD
    if _current.board is None or _current.board.world is not world:
        made = Board(world, _current.generation)
        if _current.board is None:
            atexit.register(_leave)
        _current = _Worlds(made, _current.generation + 1)
    return _current.board


def _leave() -> None:
    if _current.board is not None and dist.is_initialized():
        _current.board.leave()
