"""Values that the ranks of a group compare or give each other through the store of their world.

What all ranks are to have alike is *voted* on: each rank adds one to a counter that is named by a
digest of its value, and the rank that makes it as many as the group has members says so by a key,
for which the others wait without asking again. Two requests a rank, whatever the group's size.
Ranks of one host that know of each other (`Host`) vote there first, and the last of them gives
their votes together: two requests a host, and none where the group has no ranks elsewhere.

Where that does not come to pass, or where values differ by nature, each rank puts its own where
others find it, and one that finds them all puts what `combine` makes of them, once, for all.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final, NamedTuple

from autoshard.runtime.agreement.history import EVERY, History, also, name_of
from autoshard.runtime.agreement.threads import Background, Process
from autoshard.runtime.agreement.whereabouts import (
    FEW,
    RAISED,
    WATCHERS,
    PeerFailed,
    Whereabouts,
)

SAME: Final = object()
"""The result of an exchange in which all ranks gave the same vote."""

_LONGEST = 1e6  # seconds that a question may stay with the store
_PAUSE = 0.01  # seconds at most between two questions to the store of a host
NEAR = 64  # ranks at most that are asked for their processes where hosts are not known
_SAID = 8  # ranks of which the error of ranks that are at different things says where they are


_Kept = list[tuple[Any, str]]  # keys, and the stores that have them


class OtherExchange(Exception):
    """The ranks of a group came to different exchanges; the text says which, of the first few."""


class Host(NamedTuple):
    """The ranks of this rank's host, which are next to each other in the world, and a store that
    only they use, and which outlives any of them."""

    ranks: range
    store: Any

    def has_end(self, one: _Gathering, seconds: float) -> bool:
        """Whether a rank of the host tells within the time that all votes of the group are one. It
        is asked for often: nobody else's store is, and reads of eager code wait for it."""
        pause, until = 0.0002, time.monotonic() + seconds
        while not self.store.check([one.end]):
            if time.monotonic() > until:
                self.store.add(one.late, 1)  # from now on the end is to be in the world's store
                return bool(self.store.check([one.end]))
            time.sleep(pause)
            pause = min(1.5 * pause, _PAUSE)
        return True


@dataclass(eq=False)
class _Gathering:
    """One exchange of one group. key: begins those of it. over: that it has an end, or an error.
    speaks: whether this rank has given the votes of its host, and tells it the end."""

    key: str
    name: str
    count: int
    members: Sequence[int]
    what: str
    here: str
    combine: Callable[[list[Any]], Any]
    started: float = field(default_factory=time.monotonic)
    over: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None
    speaks: bool = False

    @property
    def end(self) -> str:
        return f"{self.key}/end"

    @property
    def late(self) -> str:
        return f"{self.key}/late"

    def is_over(self, seconds: float) -> bool:
        """Whether there is an end within the time. Raises the error of the store."""
        done = self.over.wait(seconds)
        if self.error is not None:
            raise self.error
        return done


class StoreExchange(Whereabouts):
    """The messages of one process group world, as one rank writes and reads them.

    Every rank of a group must make the same exchanges in the same order. histories: what the
    graphs of this rank gathered and reduced, by groups of ranks. every: calls between two
    comparisons of these, in the long run. host: where ranks of one host vote; None: nowhere.
    """

    def __init__(self, world: Any, generation: str) -> None:
        super().__init__(world, generation)
        self.histories: defaultdict[str, History] = defaultdict(History)
        self.every = EVERY
        self.host: Host | None = None
        self._old: dict[str, _Kept] = {}  # of the last exchange of each group
        # a second connection to the store, on which questions stay; the last that did
        self._waiting: Any = None
        self._last: _Gathering | None = None
        self._beside: dict[int, Process] | None = None  # of ranks that may be on this host

    def exchange(
        self,
        value: Any,
        what: str,
        members: Sequence[int],
        *,
        here: str = "",
        vote: str | None = None,
        combine: Callable[[list[Any]], Any] = list,
    ) -> Any:
        """What `combine` makes of the members' values, in their order; SAME where all gave the
        same `vote`. Values and results are anything that JSON holds.

        what: the name of the exchange. here: where this rank is, for the errors of others. combine:
        runs on one rank, or on several alike. Raises PeerFailed where a member will not come, or
        has not come within `limit` seconds, and after any failure that this rank knows of;
        OtherExchange where members are at exchanges of other names; AutoshardError where another
        thread of this rank is among the others.
        """
        here = here or what
        self.enter(here)
        try:
            if self.failure is not None:
                raise PeerFailed(*self.failure)
            name = name_of(members)
            count = self._counts[name] = self._counts.get(name, 0) + 1
            key = f"{self._prefix}/{name}/{count}"
            one = _Gathering(key, name, count, members, what, here, combine)
            return self._within(self.limit, lambda: self._exchange(one, value, vote))
        finally:
            self.turn.leave()

    def take_over(self, before: StoreExchange) -> None:
        """Use the connection of an exchange of the same world, where no question stays with it."""
        if before._last is None or before._last.over.is_set():
            self._waiting = before._waiting

    def _exchange(self, one: _Gathering, value: Any, vote: str | None) -> Any:
        kept: _Kept = []  # keys of this exchange that it is for this rank to delete
        text = self._voted(one, vote, kept) if vote is not None else None
        if text is None:
            text = self._gathered(one, value, kept)
        if one.speaks and not text:
            assert self.host is not None
            self.host.store.set(one.end, "")
        for store, old in self._old.get(one.name, ()):  # whoever is here has left the one before
            store.delete_key(old)
        self._old[one.name] = kept
        if not text:
            return SAME
        result = json.loads(text)
        if "apart" in result:
            raise OtherExchange(result["apart"])
        return result["is"]

    def _voted(self, one: _Gathering, vote: str, kept: _Kept) -> str | None:
        """The end where all ranks vote alike, and soon; else None, with the value to be told."""
        digest = hashlib.sha256(f"{one.what}\n{vote}".encode()).hexdigest()[:32]
        ballot, everyone = f"{one.key}/{digest}", len(one.members)
        soon, seldom = self._soon, min(self._seldom, self.limit / 4)
        host, given = self.host, 1
        here = 1 if host is None else sum(member in host.ranks for member in one.members)
        if host is not None and here > 1:
            votes = host.store.add(ballot, 1)
            if votes == 1:
                kept += [(host.store, ballot), (host.store, one.late)]
            if votes < here:
                alone = here == everyone and votes == 1  # it looks for those that are missing
                return "" if host.has_end(one, soon if alone else seldom) else None
            kept.append((host.store, one.end))
            if here == everyone:
                host.store.set(one.end, "")
                if not host.store.check([one.late]):
                    return ""
            one.speaks, given = True, here
        votes = self._store.add(ballot, given)
        if votes == given:
            kept.append((self._store, ballot))
        if votes == everyone:
            kept.append((self._store, one.end))
            self._store.set(one.end, "")
            return ""
        self._await(one)
        # an end that is none of votes has the value of this rank, which it has not told
        return "" if one.is_over(soon if votes <= WATCHERS * given else seldom) else None

    def _gathered(self, one: _Gathering, value: Any, kept: _Kept) -> str:
        """The end of an exchange to which this rank has come with its value."""
        place = self._waits_at(one.name, one.count, one.members, one.here)
        self._put(self._place(self.rank), {**place, "of": one.what, "value": value})
        counter = f"{one.key}/came"
        came = self._store.add(counter, 1)
        if came == 1:
            kept.append((self._store, counter))
        if came == len(one.members):
            kept.append((self._store, one.end))
            text = self._closed(one)
        else:
            if self._last is not one:
                self._await(one)
            self._stay(one, came <= WATCHERS, kept)
            text = self._store.get(one.end).decode()
        self._put(self._place(self.rank), {})
        return text

    def _await(self, one: _Gathering) -> None:
        """Have a thread wait for the end, so that the store tells of it unasked."""
        if self._waiting is None:
            self._waiting = self._store.clone()
        self._last = one
        waiting, longest = self._waiting, min(2 * self.limit + 10, _LONGEST)

        def work(_: threading.Event) -> None:
            try:
                waiting.wait([one.end], timedelta(seconds=longest))
            except BaseException as error:  # raised in the thread of the exchange
                one.error = error
            one.over.set()

        Background("waiting", work)

    def _stay(self, one: _Gathering, watches: bool, kept: _Kept) -> None:
        """Wait for the end, and look meanwhile for whoever keeps it from coming."""
        looks, pause = 0, self._soon
        patience = self.limit * (1 if watches else 1.1)
        while not one.is_over(pause):
            waited = time.monotonic() - one.started
            if self._has(self._failed) and not self._has(one.end):
                raise self._heard()
            if (dead := self._dead(one)) is not None and not self._has(one.end):
                told = self._where_is(dead)
                silent = f"died without a word: its process is gone, while rank {self.rank} waited "
                silent += f"at the {one.here}; out of memory, or killed"
                raise self._fail(dead, str(told["what"]) if told.get("state") == RAISED else silent)
            if watches or waited > patience:
                self._look(one, looks, kept)
                looks += 1
            if waited > patience and (late := self._absent(one)) and not self._has(one.end):
                first = next(iter(late))
                raise self._fail(first, self._late(first, one))
            pause = max(0.01, min(1.5 * pause, self.seldom, patience - waited))

    def _dead(self, one: _Gathering) -> int | None:
        """A member whose process is gone, of those on this host, or among few: asked for once."""
        if self._beside is None:
            near = self.host.ranks if self.host is not None else range(min(self.size, NEAR))
            keys = [self._process(rank) for rank in near]
            if not self._store.check(keys):  # one has not begun yet
                return None
            told = zip(near, self._read(keys), strict=True)
            self._beside = {rank: Process(*said) for rank, said in told if said is not None}
        beside = ((member, self._beside.get(member)) for member in one.members)
        return next((m for m, process in beside if process is not None and process.has_ended), None)

    def _look(self, one: _Gathering, looks: int, kept: _Kept) -> None:
        """Raise PeerFailed where a rank will not come to where this one waits; end the exchange
        where all have come, and the last has not said so."""
        missing = self._absent(one, looks)
        stories = {m: self._where(m, place, one.name, one.here) for m, place in missing.items()}
        if self._has(one.end):  # asked after the look: what a rank gave before it failed is given
            return
        for member, story in stories.items():
            if story is not None:
                raise self._fail(member, story)
        if not missing:
            kept.append((self._store, one.end))
            self._closed(one)

    def _absent(self, one: _Gathering, looks: int = 0) -> dict[int, dict[str, Any]]:
        """A few members that have not told that they are here, and what they told: each look begins
        at others."""
        first = FEW * looks % len(one.members)
        members = [*one.members[first:], *one.members[:first]]
        places = [self._place(member) for member in members]
        untold = self._without(places)
        if untold:
            return {members[at]: {} for at in untold}
        read = zip(members, self._read(places), strict=True)
        return dict([(m, place) for m, place in read if not _is_at(place, one)][:FEW])

    def _all_absent(self, one: _Gathering) -> list[int]:
        """All members that have not told that they are here: for an error, which is once."""
        untold = self._without([self._place(member) for member in one.members], len(one.members))
        away = [one.members[at] for at in untold]
        told = [member for member in one.members if member not in {*away}]
        read = zip(told, self._read([self._place(member) for member in told]), strict=True)
        return [*away, *(member for member, place in read if not _is_at(place, one))]

    def _closed(self, one: _Gathering) -> str:
        """The end of an exchange to which all have come, told to all."""
        told = self._read([self._place(member) for member in one.members])
        if not all(
            _is_at(place, one) for place in told
        ):  # another has ended it, and some have left
            return str(self._store.get(one.end).decode())
        if len({place["of"] for place in told}) > 1:
            first = {place["of"]: at for at, place in reversed([*enumerate(told)])}
            said = [
                f"rank {member}: {place['what']}"
                for at, (member, place) in enumerate(zip(one.members, told, strict=True))
                if at in first.values() or len(told) <= _SAID
            ]
            text = json.dumps({"apart": "; ".join(said)})
        else:
            text = json.dumps({"is": one.combine([place["value"] for place in told])})
        self._store.set(one.end, text)
        return text

    def _late(self, late: int, one: _Gathering) -> str:
        """The story of a rank that has not come."""
        place = self._where_is(late)
        if place.get("state") == RAISED:
            return str(place["what"])
        nor = also([member for member in self._all_absent(one) if member != late])
        return (
            f"did not arrive within {self.limit:g} seconds at the {one.here}, where rank "
            f"{self.rank} waited{nor}; it is stopped, elsewhere, or slower: ranks whose batches "
            "differ in shape, or that take different branches, run different graphs"
        )

    def _read(self, keys: list[str]) -> list[Any]:
        if self._store.has_extended_api():
            texts = self._store.multi_get(keys)
        else:
            texts = [self._store.get(key) for key in keys]
        return [json.loads(text) for text in texts]


def _is_at(place: dict[str, Any], one: _Gathering) -> bool:
    return place.get("name") == one.name and place.get("count") == one.count
