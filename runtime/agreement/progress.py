"""How far a rank has come, for whoever waits for it: collectives of graphs, counted by their ranks.

A rank inside of a collective cannot say so, and says nothing of it before: that would cost each
step a message. A thread looks at the counts now and then, and tells those that stand still. They
are proof: a rank that has entered a collective which another one has not, and which that one does
not come to because it waits for the first at something else, waits for ever.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Sequence

LOOK = 1.0  # seconds for which counts stand still before they are told


def name_of(members: Sequence[int]) -> str:
    """The name of a group of ranks in messages."""
    return hashlib.sha256(repr(tuple(members)).encode()).hexdigest()[:12]


class CountedRegions:
    """The regions with collectives that this rank has entered, by the name of the group of ranks.

    counts: of each group. doing: the region that was entered last. tell: called by a thread, once
    for each time that all of it stands still; it returns False to end the thread.
    """

    def __init__(self, tell: Callable[[], bool]) -> None:
        self.counts: dict[str, int] = {}
        self.doing = ""
        self._tell = tell
        self._changes = 0
        self._started = False

    def enter(self, groups: Sequence[str], doing: str) -> None:
        """Count a region before its first collective."""
        for name in groups:
            self.counts[name] = self.counts.get(name, 0) + 1
        self.doing = doing
        self._changes += 1
        if not self._started:
            self._started = True
            threading.Thread(target=self._watch, name="autoshard-progress", daemon=True).start()

    def undo(self, groups: Sequence[str]) -> None:
        """Take back a region that failed by itself, before the others would meet it there."""
        for name in groups:
            self.counts[name] -= 1
        self._changes += 1

    def _watch(self) -> None:
        seen = -1
        while True:
            time.sleep(LOOK)
            still, seen = seen == self._changes, self._changes
            if still and not self._tell():
                return
