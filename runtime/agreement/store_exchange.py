"""Messages between ranks through the process group's store, which nobody waits for without end.

A collective that one rank does not enter holds the others for as long as the process group allows.
Here a waiting rank looks for the missing one. That it failed, has ended, waits for something else,
or is over the time limit is an error at once, and the end of all exchanges in this world: once one
rank has failed, nobody knows which collectives the others have entered.
"""

from __future__ import annotations

import json
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from autoshard.runtime.agreement.history import CountedRegions, History, name_of
from autoshard.runtime.agreement.threads import StoreLost, Turn, refusal, within

T = TypeVar("T")

DEFAULT_LIMIT = 600.0
SPARE = 1.0  # seconds at least after which it is the store that does not answer
_ENDED, _RAISED, _WAITS = "ended", "raised", "waits"
_LOOK = 0.2  # seconds between looks at where the missing ranks are


class PeerFailed(Exception):
    """The first failure of a world: on which rank (None: it is the store), and what happened."""

    def __init__(self, rank: int | None, story: str) -> None:
        super().__init__(rank, story)
        self.rank, self.story = rank, story

    def __str__(self) -> str:
        who = "the store of the process group" if self.rank is None else f"rank {self.rank}:"
        return f"{who} {self.story.rstrip('.')}"


class StoreExchange:
    """The messages of one process group world, as one rank writes and reads them.

    Every rank of a group must make the same exchanges in the same order. limit: how many seconds
    a rank waits for the others. failure: rank and story of the world's first failure, where this
    rank knows of one. turn: of the threads of this rank. progress: the collectives of graphs that
    it has entered, by groups of ranks. histories: what these gathered and reduced, likewise.
    """

    def __init__(self, world: Any, generation: int) -> None:
        self.world, self.rank = world, dist.get_rank()
        self.limit = DEFAULT_LIMIT
        self.failure: tuple[int | None, str] | None = None
        self.turn = Turn()
        self._prefix = f"autoshard/{generation}"
        self._store: Any = world.get_group_store()
        self._counts: dict[str, int] = {}
        self._failing = threading.Lock()
        self._has_raised = False
        self._told_of = ""
        self.histories: defaultdict[str, History] = defaultdict(History)
        me = weakref.ref(self)
        self.progress = CountedRegions(
            lambda: (exchange := me()) is not None and exchange._stands()
        )

    def exchange(self, value: Any, what: str, members: Sequence[int]) -> list[Any]:
        """The values that the members gave, in their order; `value` is anything that JSON holds.

        what: where this rank is, for the errors of others. Raises PeerFailed where a member will
        not come, or has not come within `limit` seconds, and after any failure that this rank
        knows of; AutoshardError where another thread of this rank is among the others.
        """
        self.enter(what)
        try:
            if self.failure is not None:
                raise PeerFailed(*self.failure)
            return self._within(self.limit, lambda: self._exchange(value, what, members))
        finally:
            self.turn.leave()

    def enter(self, doing: str) -> None:
        """Take the turn for this thread; where another has it, the failure is told to all."""
        try:
            self.turn.enter(doing)
        except Exception as error:
            self.fail(self.rank, str(error))
            raise

    def leave(self) -> None:
        """Give the turn back. Raises AutoshardError where another thread came meanwhile."""
        if (disturbed := self.turn.leave()) is not None:
            raise refusal(disturbed)

    def fail(self, rank: int | None, story: str) -> PeerFailed:
        """The world's first failure, which is this one where no rank has told of another."""
        if self.failure is None:
            try:
                within(min(self.limit, 5.0), lambda: self._fail(rank, story))
            except StoreLost:  # then nobody hears of it, and nobody has told of another
                self.failure = rank, story
        assert self.failure is not None
        return PeerFailed(*self.failure)

    def raised(self, story: str) -> None:
        """Tell whoever misses this rank that it raised an error, which it may have caught."""
        self._has_raised = True
        self._tell({"state": _RAISED, "what": story})

    def goes_on(self) -> None:
        """Take back what `raised` told."""
        if self._has_raised:
            self._has_raised = False
            self._tell({"state": _WAITS, "name": "", "count": 0, "members": [], "what": ""})

    def ended(self, story: str) -> None:
        """Tell whoever waits, now or later, that this process has ended, and how."""
        self._tell({"state": _ENDED, "what": story})

    def roll_call(
        self, here: str, peers: Mapping[int, str], waited: float, gone: bool = False
    ) -> PeerFailed:
        """Why a collective did not end: the failure of the rank that did not come.

        here: where this rank is. peers: the axis of each rank that shares one with this one.
        waited: seconds in the collective. gone: whether a connection was closed meanwhile. All
        ranks that miss another are here within moments of each other; whoever is not is stopped, or
        elsewhere. Takes up to a quarter of `limit`, and half a minute at most.
        """
        if self.failure is None:
            grace = min(max(1.0, self.limit / 4), 30.0)
            try:
                within(2 * grace + SPARE, lambda: self._roll_call(here, peers, grace, waited, gone))
            except PeerFailed:
                pass
            except StoreLost as lost:
                self.failure = None, str(lost)
        assert self.failure is not None
        return PeerFailed(*self.failure)

    def _within(self, limit: float, call: Callable[[], T]) -> T:
        try:
            return within(limit + max(SPARE, limit / 4), call)
        except StoreLost as lost:
            self.failure = None, str(lost)
            raise PeerFailed(*self.failure) from None

    def _tell(self, place: dict[str, Any]) -> None:
        try:
            within(5 * SPARE, lambda: self._put(self._place(self.rank), place))
        except Exception:  # the store is gone, and so are those who would read it
            return

    def _exchange(self, value: Any, what: str, members: Sequence[int]) -> list[Any]:
        name = name_of(members)
        count = self._counts[name] = self._counts.get(name, 0) + 1
        here = {"name": name, "count": count, "members": list(members), "what": what}
        self._put(self._slot(name, count, self.rank), value)
        self._put(self._place(self.rank), {"state": _WAITS, **here})
        given = self._collect(name, count, members, what)
        given[self.rank] = value
        if count > 1:  # whoever wrote this one has read the one before
            self._store.delete_key(self._slot(name, count - 1, self.rank))
        return [given[member] for member in members]

    def _fail(self, rank: int | None, story: str) -> PeerFailed:
        with self._failing:
            if self.failure is None:
                # sets the key where there is none, and returns what it holds
                text = self._store.compare_set(self._failed, "", json.dumps([rank, story]))
                rank, story = json.loads(text)
                self.failure = rank, story
        return PeerFailed(*self.failure)

    def _collect(self, name: str, count: int, members: Sequence[int], what: str) -> dict[int, Any]:
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
                self._look(name, slots, what)
            if now - started > self.limit:
                late = next((m for m, slot in slots.items() if not self._has(slot)), None)
                if late is not None:
                    raise self._fail(late, self._absent(late, what))
            time.sleep(pause)
            pause = min(1.5 * pause, 0.05)

    def _absent(self, late: int, what: str) -> str:
        """The story of a rank that has not come."""
        place = self._where_is(late)
        if place.get("state") == _RAISED:
            return place["what"]
        return (
            f"did not arrive within {self.limit:g} seconds at the {what}, where rank {self.rank} "
            "waited; it is stopped, elsewhere, or slower: ranks whose batches differ in shape, or "
            "that take different branches, run different graphs"
        )

    def _look(self, name: str, slots: dict[int, str], here: str) -> None:
        """Raise PeerFailed where a rank will not come to where this one waits."""
        failed = self._has(self._failed)
        places = {} if failed else {m: self._where(m, name, here) for m in slots}
        # asked after the look: what a rank gave before it failed is given
        missing = [member for member, slot in slots.items() if not self._has(slot)]
        if failed and missing:
            raise self._heard()
        for member in missing:
            if (story := places.get(member)) is not None:
                raise self._fail(member, story)

    def _heard(self) -> PeerFailed:
        """The failure that another rank told of."""
        rank, story = json.loads(self._store.get(self._failed))
        self.failure = rank, story
        return PeerFailed(rank, story)

    def _where(self, member: int, name: str, here: str) -> str | None:
        """Why a rank will not come to the exchanges of the group `name`; None where it may."""
        place = self._where_is(member)
        if place.get("state") == _ENDED:
            return str(place["what"])
        waits_for_me = (
            place.get("state") == _WAITS
            and place["name"] != name
            and self.rank in place["members"]
            and place["count"] > self._counts.get(place["name"], 0)
        )
        if waits_for_me:
            return f"is elsewhere: {place['what']}"
        if self._has(self._progress(member)):
            counts, doing = json.loads(self._store.get(self._progress(member)))
            if counts.get(name, 0) > self.progress.counts.get(name, 0):
                return (
                    f"is elsewhere: in {doing}, which rank {self.rank} has not come to, while rank "
                    f"{self.rank} waited at the {here}"
                )
        return None

    def _stands(self) -> bool:
        """Tell the progress where it is news, and hear of a failure: this rank may be in a
        collective, whose end the store does not outlive. False where there is nothing to do."""
        if self.failure is not None:
            return False
        try:
            news = self.progress.counts, self.progress.doing
            if (text := json.dumps(news)) != self._told_of:
                self._store.set(self._progress(self.rank), text)
                self._told_of = text
            if self.turn.taken and self._has(self._failed):
                self._heard()
        except Exception:  # the store is gone: who waits for it says so
            return False
        return True

    def _where_is(self, member: int) -> dict[str, Any]:
        """What a rank last told of itself; empty where it has told nothing."""
        if not self._has(self._place(member)):
            return {}
        place: dict[str, Any] = json.loads(self._store.get(self._place(member)))
        return place

    def _roll_call(
        self, here: str, peers: Mapping[int, str], grace: float, waited: float, gone: bool
    ) -> None:
        """Raise PeerFailed with the world's first failure."""
        self._put(self._missed(self.rank), here)
        others = [rank for rank in range(dist.get_world_size()) if rank != self.rank]
        others.sort(key=lambda rank: (rank not in peers, rank))
        started = time.monotonic()
        while True:
            if self._has(self._failed):
                raise self._heard()
            missing = [rank for rank in others if not self._has(self._missed(rank))]
            for rank in missing:
                if (story := self._told(rank, here)) is not None:
                    raise self._fail(rank, story)
            if not missing:
                raise self._fail(
                    self.rank, f"{here}: so has every other rank; they ran different collectives"
                )
            # a rank that shares no axis with the missing leaves the word to one that does
            late = next((rank for rank in missing if not self._waits(rank)), missing[0])
            if time.monotonic() - started > grace * (1 if late in peers else 1.5):
                axis = f" of axis {peers[late]}" if late in peers else ""
                where = f"where rank {self.rank} waited ({here})"
                story = (
                    f"died without a word: its connection was closed after {waited:.3g} seconds "
                    f"in a collective{axis}, {where}; out of memory, or killed"
                    if gone
                    else f"did not come to a collective{axis} within {waited:.3g} seconds, "
                    f"{where}; it is stopped, or busy elsewhere"
                )
                raise self._fail(late, story)
            time.sleep(_LOOK / 4 * max(1, len(others) / 8))

    def _waits(self, rank: int) -> bool:
        """Whether a rank waits for another in an exchange: it will say for which."""
        place = self._where_is(rank)
        if place.get("state") != _WAITS or not place["members"]:
            return False
        slots = [self._slot(place["name"], place["count"], m) for m in place["members"]]
        return not self._store.check(slots)

    def _told(self, rank: int, here: str) -> str | None:
        """What a rank that misses a collective told of itself, where that is the reason."""
        place = self._where_is(rank)
        if place.get("state") in (_ENDED, _RAISED):
            return str(place["what"])
        if place.get("state") != _WAITS or self.rank not in place["members"]:
            return None
        slot = self._slot(place["name"], place["count"], self.rank)
        gone = place["count"] <= self._counts.get(place["name"], 0)
        if gone or self._has(slot):
            return None
        return f"is elsewhere: at the {place['what']}, while rank {self.rank} was in {here}"

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

    def _progress(self, rank: int) -> str:
        return f"{self._prefix}/progress/{rank}"

    def _missed(self, rank: int) -> str:
        return f"{self._prefix}/missed/{rank}"

    def _slot(self, name: str, count: int, rank: int) -> str:
        return f"{self._prefix}/{name}/{count}/{rank}"

    def _put(self, key: str, value: Any) -> None:
        self._store.set(key, json.dumps(value))
