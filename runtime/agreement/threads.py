"""Threads of a rank: one at a time is where ranks meet, and questions to the store end.

Ranks meet in the order of their calls. Of two threads of a process, one could meet the other
thread of another process: two batches would be added up, without a word.

A TCPStore waits for the answer to a question without any limit, whatever has become of the process
that holds it: a host that is frozen would hold every rank that asks. So questions are asked in a
thread that is left behind where none comes.

A rank that waits there for a process which was killed hears nothing of it: ranks of one host look.

No thread is left in a call of torch when the process exits, for that would abort it: `Background`.
"""

import atexit
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch.distributed as dist

from autoshard.runtime.errors import AutoshardError

T = TypeVar("T")

_LEAVE = 1.0  # seconds at most for which an exit waits for threads that are to end
_HOLDER = "the process that holds it (rank 0, or torchrun's agent)"


class Background(threading.Thread):
    """Work beside the process's other threads, from now on. over: set when it is to end.

    Where a thread returns from a call of torch while the interpreter ends, Python up to 3.13 ends
    it in the midst of C++, which aborts the process ("terminate called without an active
    exception") after all its work was done. So an exit waits for these threads, for a moment.
    """

    def __init__(self, name: str, work: Callable[[threading.Event], object]) -> None:
        self.over = threading.Event()
        super().__init__(target=work, args=(self.over,), name=f"autoshard-{name}", daemon=True)
        self.start()


@atexit.register
def _end_background() -> None:
    """After all that uses them at exit, which is registered later and runs before."""
    left = [one for one in threading.enumerate() if isinstance(one, Background)]
    for one in left:
        one.over.set()
    until = time.monotonic() + _LEAVE
    for one in left:
        one.join(max(0.0, until - time.monotonic()))


class StoreLost(Exception):
    """The store does not answer any more; the text says why."""


def within(seconds: float, call: Callable[[], T]) -> T:
    """The result of `call`, or its error. Raises StoreLost where it has not returned in time, or
    has found the connection closed."""
    results: list[T] = []
    errors: list[BaseException] = []

    def work(_: threading.Event) -> None:
        try:
            results.append(call())
        except BaseException as error:  # raised below, in the caller's thread
            errors.append(error)

    Background("store", work).join(seconds)
    if errors and isinstance(errors[0], dist.DistError):
        reason = str(errors[0]).partition("\n")[0]
        raise StoreLost(f"is gone: {_HOLDER} has ended ({reason})") from None
    if errors:
        raise errors[0]
    if not results:
        raise StoreLost(
            f"did not answer within {seconds:g} seconds: {_HOLDER} is frozen or cut off"
        )
    return results[0]


class Process(NamedTuple):
    """A process of Linux. host: its boot and the space of its numbers. began: its start, by which
    a later process of the same number is another one."""

    host: str
    number: int
    began: str

    @property
    def has_ended(self) -> bool:
        """Whether it is known to have: of this host, and gone or not yet buried."""
        if self.host != _host():
            return False
        found = _stat(self.number)
        return found is None or found[0] in "ZX" or found[1] != self.began


def this_process() -> Process | None:
    """None where the operating system does not say."""
    found = _stat(os.getpid())
    return None if found is None else Process(_host(), os.getpid(), found[1])


def _host() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _stat(process: int) -> tuple[str, str] | None:
    """State and start of a process; None where there is none."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2].split()
    except OSError:
        return None
    return fields[0], fields[19]


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
        f"{what}; the other ranks cannot tell their collectives apart",
        remedy="Call sharded models from one thread, or under one lock that every rank takes "
        "in the same order. Then start all processes again.",
    )
