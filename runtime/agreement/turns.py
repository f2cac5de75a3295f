"""One thread at a time is where ranks meet.

Ranks meet in the order of their calls. Of two threads of a process, one could meet the other
thread of another process: two batches would be added up, without a word.
"""

from __future__ import annotations

import threading

from autoshard.runtime.errors import AutoshardError, message


class Turn:
    """The thread that is among other ranks now, and what it does there.

    A thread that comes meanwhile is refused at once. The first one is told when it leaves: what it
    has computed may be a mixture, because on another rank the second may have come first.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: int | None = None
        self._name, self._doing, self._depth = "", "", 0
        self._disturbed: str | None = None

    def enter(self, doing: str) -> None:
        """Take the turn, or keep it. Raises AutoshardError where another thread has it."""
        me = threading.get_ident()
        if self._owner == me:
            self._depth += 1
            return
        name = threading.current_thread().name
        if not self._lock.acquire(blocking=False):
            self._disturbed = (
                f"two threads at once: {name} ({doing}) and {self._name} ({self._doing})"
            )
            raise refusal(self._disturbed)
        self._owner, self._name, self._doing, self._depth = me, name, doing, 1

    @property
    def taken(self) -> bool:
        """Whether a thread of this process is among other ranks."""
        return self._owner is not None

    def leave(self) -> str | None:
        """Give the turn back; which other thread has been refused meanwhile, if any."""
        self._depth -= 1
        if self._depth:
            return None
        disturbed, self._disturbed = self._disturbed, None
        self._owner = None
        self._lock.release()
        return disturbed


def refusal(what: str) -> AutoshardError:
    """The error of both threads."""
    return AutoshardError(
        message(
            f"{what}; the other ranks cannot tell their collectives apart",
            remedy="Call sharded models from one thread, or under one lock that every rank takes "
            "in the same order. Then start all processes again.",
        )
    )
