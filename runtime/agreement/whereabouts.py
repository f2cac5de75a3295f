"""What ranks tell of themselves through the process group's store: where they wait, that they fail.

A collective that one rank does not enter holds the others for as long as the process group allows.
Here a waiting rank looks for the missing one. That it failed, has ended, waits for something else,
or is over the time limit is an error at once, and the end of all exchanges in this world: once one
rank has failed, nobody knows which collectives the others have entered.

The store is one process, which takes some 20 microseconds for a question of a rank. So a rank tells
where it is only when it has waited, a few ranks of a group look for those that are missing, and all
others ask now and then for the one key of a failure: the more ranks there are, the less often.
"""

import json
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from autoshard.runtime.agreement.history import CountedRegions, also
from autoshard.runtime.agreement.threads import (
    StoreLost,
    Turn,
    refusal,
    this_process,
    within,
)

T = TypeVar("T")

DEFAULT_LIMIT = 600.0
SPARE = 1.0  # seconds at least after which it is the store that does not answer
WATCHERS = 3  # ranks of a group that look for the missing: one of them may die as well
LOOK = 0.2  # seconds after which a rank says where it waits, and between two looks at first
_QUIET = 512  # ranks of a world from which on they ask less often, in proportion
FEW = 8  # missing ranks of which one look asks where they are
_ENDED, RAISED, _WAITS = "ended", "raised", "waits"


class PeerFailed(Exception):
    """The first failure of a world: on which rank (None: it is the store), and what happened."""

    def __init__(self, rank: int | None, story: str) -> None:
        super().__init__(rank, story)
        self.rank, self.story = rank, story

    def __str__(self) -> str:
        who = "the store of the process group" if self.rank is None else f"rank {self.rank}:"
        return f"{who} {self.story.rstrip('.')}"


class Whereabouts:
    """Where the ranks of one process group world are, as one of them tells and hears it.

    limit: how many seconds a rank waits for the others. failure: rank and story of the world's
    first failure, where this rank knows of one. turn: of the threads of this rank. progress: the
    collectives of graphs that it has entered, by groups of ranks.
    """

    def __init__(self, world: Any, generation: str) -> None:
        self.world, self.rank, self.size = world, world.rank(), world.size()
        self.limit = DEFAULT_LIMIT
        self.failure: tuple[int | None, str] | None = None
        self.turn = Turn()
        self._prefix = f"autoshard/{generation}"
        self._store: Any = world.get_group_store()
        self._counts: dict[str, int] = {}  # exchanges of each group
        self._failing = threading.Lock()
        self._has_raised = False
        self._told_of = ""
        me = weakref.ref(self)
        self.progress = CountedRegions(lambda: (here := me()) is not None and here._stands())
        self._asked = 0.0  # when this rank asked for a failure while it stood still

    @property
    def prefix(self) -> str:
        """What the keys of this world begin with."""
        return self._prefix

    def begun(self) -> int:
        """How many processes have said that they are this rank of this world: more than one where
        the store has outlived another."""
        return int(self._store.add(f"{self._prefix}/begun/{self.rank}", 1))

    def tell_process(self) -> None:
        """Tell ranks of this host by what they see that this one was killed."""
        self._put(self._process(self.rank), this_process())

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
        self._tell({"state": RAISED, "what": story})

    def goes_on(self) -> None:
        """Take back what `raised` told."""
        if self._has_raised:
            self._has_raised = False
            self._tell({})

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
        elsewhere. Takes up to a quarter of `limit`, and half a minute at most; some seconds where a
        process has died.
        """
        if self.failure is None:
            grace = min(max(1.0, self.limit / 4), 30.0)
            if gone:  # a process has died, and the threads of those that live say that they do
                grace = min(grace, 2.0 + 2.0 * self.seldom)
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

    def _fail(self, rank: int | None, story: str) -> PeerFailed:
        with self._failing:
            if self.failure is None:
                # sets the key where there is none, and returns what it holds
                text = self._store.compare_set(self._failed, "", json.dumps([rank, story]))
                rank, story = json.loads(text)
                self.failure = rank, story
        return PeerFailed(*self.failure)

    def heard_of(self) -> PeerFailed | None:
        """The failure that a rank told of, for one that is in a collective: it asks seldom."""
        try:
            within(self.seldom + SPARE, lambda: self._has(self._failed) and self._heard())
        except StoreLost:  # the collective tells whether its holder is gone
            return None
        return None if self.failure is None else PeerFailed(*self.failure)

    def _heard(self) -> PeerFailed:
        """The failure that another rank told of."""
        rank, story = json.loads(self._store.get(self._failed))
        self.failure = rank, story
        return PeerFailed(rank, story)

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
            if time.monotonic() - self._asked > self._seldom:
                self._asked = time.monotonic()
                if self._has(self._failed):
                    self._heard()
                elif self._has(self._missed("count")):  # a roll call: this rank is late, and lives
                    self._put(self._missed(f"lives {self.rank}"), True)
        except Exception:  # the store is gone: who waits for it says so
            return False
        return True

    def _waits_at(self, name: str, count: int, members: Sequence[int], what: str) -> dict[str, Any]:
        """The place of a rank that waits in an exchange of the group `name`."""
        group = _ranks_text(members)
        return {"state": _WAITS, "name": name, "count": count, "members": group, "what": what}

    def _where(self, member: int, place: dict[str, Any], name: str, here: str) -> str | None:
        """Why a rank will not come to the exchanges of the group `name`; None where it may. place:
        what it last told."""
        if place.get("state") == _ENDED:
            return str(place["what"])
        waits_for_me = (
            place.get("state") == _WAITS
            and place["name"] != name
            and _is_among(self.rank, place["members"])
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

    def _where_is(self, member: int) -> dict[str, Any]:
        """What a rank last told of itself; empty where it has told nothing."""
        if not self._has(self._place(member)):
            return {}
        place: dict[str, Any] = json.loads(self._store.get(self._place(member)))
        return place

    def _roll_call(
        self, here: str, peers: Mapping[int, str], grace: float, waited: float, gone: bool
    ) -> None:
        """Raise PeerFailed with the world's first failure.

        The ranks that come first look for the missing, and say whom they miss; of the others only
        those that share an axis with one of these look as well.
        """
        self._put(self._missed(self.rank), here)
        looks = self._store.add(self._missed("count"), 1) <= WATCHERS
        others = [rank for rank in range(self.size) if rank != self.rank]
        others.sort(key=lambda rank: (rank not in peers, rank))
        started = time.monotonic()
        while True:
            if self._has(self._failed):
                raise self._heard()
            if looks:
                self._judge(here, peers, others, grace, started, waited, gone)
            elif self._has(self._missed("few")):
                looks = any(
                    rank in peers for rank in json.loads(self._store.get(self._missed("few")))
                )
            elif time.monotonic() - started > 1.7 * grace:  # those that came first are gone too
                looks = True
            time.sleep(LOOK / 4 if looks else min(self._seldom / 4, grace / 4))

    def _judge(
        self,
        here: str,
        peers: Mapping[int, str],
        others: Sequence[int],
        grace: float,
        started: float,
        waited: float,
        gone: bool,
    ) -> None:
        """Raise PeerFailed where it is known which rank is missing, or has to be by now."""
        missing = [others[at] for at in self._without([self._missed(rank) for rank in others])]
        for rank in missing:
            if (story := self._told(rank, here)) is not None:
                raise self._fail(rank, story)
        if not missing:
            raise self._fail(
                self.rank, f"{here}: so has every other rank; they ran different collectives"
            )
        self._put(self._missed("few"), missing)
        # a rank that shares no axis with the missing leaves the word to one that does
        silent = [rank for rank in missing if not (gone and self._lives(rank))]
        late = next((rank for rank in silent if not self._waits(rank)), (silent or missing)[0])
        if time.monotonic() - started > grace * (1 if late in peers else 1.5):
            axis = f" of axis {peers[late]}" if late in peers else ""
            where = f"where rank {self.rank} waited ({here})"
            unmet = self._without([self._missed(rank) for rank in others], len(others))
            away = [others[at] for at in unmet if others[at] != late]
            nor = also([r for r in away if not (gone and self._lives(r)) and not self._waits(r)])
            story = (
                f"died without a word: its connection was closed after {waited:.3g} seconds "
                f"in a collective{axis}, {where}{nor}; out of memory, or killed"
                if gone
                else f"did not come to a collective{axis} within {waited:.3g} seconds, "
                f"{where}{nor}; it is stopped, or busy elsewhere"
            )
            raise self._fail(late, story)

    def _lives(self, rank: int) -> bool:
        """Whether a rank has said that it lives since a roll call began."""
        return self._has(self._missed(f"lives {rank}"))

    def _waits(self, rank: int) -> bool:
        """Whether a rank waits for another in an exchange: it will say for which."""
        return self._where_is(rank).get("state") == _WAITS

    def _told(self, rank: int, here: str) -> str | None:
        """What a rank that misses a collective told of itself, where that is the reason."""
        place = self._where_is(rank)
        if place.get("state") in (_ENDED, RAISED):
            return str(place["what"])
        if place.get("state") != _WAITS or not _is_among(self.rank, place["members"]):
            return None
        if place["count"] <= self._counts.get(place["name"], 0):
            return None
        return f"is elsewhere: at the {place['what']}, while rank {self.rank} was in {here}"

    def _without(self, keys: Sequence[str], most: int = FEW) -> list[int]:
        """The places of the first few keys that the store has not, by questions about halves."""
        found: list[int] = []
        parts = [range(len(keys))]
        while parts and len(found) < most:
            part = parts.pop()
            if not part or self._store.check([keys[at] for at in part]):
                continue
            half = len(part) // 2
            if half == 0:
                found.append(part[0])
            else:
                parts += [part[half:], part[:half]]
        return found

    @property
    def seldom(self) -> float:
        """Seconds between two questions of a rank that only hears whether another has failed."""
        return max(1.0, self._seldom)

    @property
    def _soon(self) -> float:
        """Seconds after which the few ranks of a group that look for others do so."""
        return max(LOOK, self._seldom / 4)

    @property
    def _seldom(self) -> float:
        """Seconds after which all others do, and between two questions of each in the long run."""
        return LOOK * max(1.0, self.size / _QUIET)

    def _has(self, key: str) -> bool:
        return bool(self._store.check([key]))

    @property
    def _failed(self) -> str:
        return f"{self._prefix}/failed"

    def _place(self, rank: int) -> str:
        return f"{self._prefix}/at/{rank}"

    def _progress(self, rank: int) -> str:
        return f"{self._prefix}/progress/{rank}"

    def _process(self, rank: int) -> str:
        return f"{self._prefix}/process/{rank}"

    def _missed(self, what: int | str) -> str:
        return f"{self._prefix}/missed/{what}"

    def _put(self, key: str, value: Any) -> None:
        self._store.set(key, json.dumps(value))


def _ranks_text(members: Sequence[int]) -> list[int] | str:
    """A group of ranks in few letters: first, step and number where they are evenly spaced, as
    those of an axis."""
    step = members[1] - members[0] if len(members) > 1 else 1
    if list(members) == [members[0] + i * step for i in range(len(members))]:
        return f"{members[0]} {step} {len(members)}"
    return list(members)


def _is_among(rank: int, group: list[int] | str) -> bool:
    if isinstance(group, list):
        return rank in group
    first, step, number = map(int, group.split())
    return step != 0 and (rank - first) % step == 0 and 0 <= (rank - first) // step < number
