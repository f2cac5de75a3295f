"""What a rank has done with a group of ranks: calls, compared with theirs, and how far it has come.

Data-parallel ranks have batches of their own, and may take other branches: two ranks that run other
graphs gather or reduce other parameters with each other, and where those are of one size nothing
fails. The ranks compare all calls so far before each of the first few that train after a backward.
Else it would cost too many messages, and they do at the first, second, fourth, eighth... and at
every 256th, or as often as an option says: a difference stays one, as the hash of a call is mixed
with that of all before it.

A rank inside of a collective cannot say so, and says nothing of it before: that would cost each
step a message. A thread looks at the counts of collectives now and then, and tells those that stand
still. They are proof: a rank that has entered a collective which another one has not, and which
that one does not come to because it waits for the first at something else, waits for ever.
"""

import hashlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise

from autoshard.runtime.agreement.threads import Background

EVERY = 256  # calls between two comparisons, in the long run
TRAINING = 8  # calls after a backward that are all compared, where they train
_KEPT = 64  # lines of the latest calls, of which an error names the first that differs
_PRIME = (1 << 61) - 1
_FEW = 3


def mixed(digest: int, number: int) -> int:
    """The digest of a sequence with one more number."""
    return (digest * 1_000_003 + number) % _PRIME


class Call:
    """The collectives of a call. what: the code; names: of the parameters gathered or reduced."""

    def __init__(self, what: str, names: Sequence[str]) -> None:
        code = hashlib.sha256(repr((what, sorted(names))).encode()).hexdigest()[:15]
        few = ", ".join(names[:_FEW]) + (", ..." if len(names) > _FEW else "")
        self.line = f"{what} with {len(names)} parameters ({few}; {code[:6]})"
        self.number = int(code, 16)


class History:
    """The calls of one rank with one group. number: the digest of all of them, in their order."""

    def __init__(self) -> None:
        self._count = self._mixed = self._before = self._compared = self._since = 0
        self._latest: deque[str] = deque(maxlen=_KEPT)

    def add(self, call: Call, trains: bool = False, every: int = EVERY) -> bool:
        """Whether the ranks are to compare their histories now, before this call's collectives."""
        self._count, self._since = self._count + 1, self._since + 1
        self._before, self._mixed = self._mixed, mixed(self._mixed, call.number)
        self._latest.append(call.line)
        early = trains and self._since <= TRAINING
        if not early and self._count & (self._count - 1) and self._count % every:
            return False
        again = self._count <= self._compared
        self._compared = max(self._compared, self._count)
        return not again

    def undo(self) -> None:
        """Take back the last call, which failed by itself: a rank may catch that, and call again,
        which the others neither see nor compare a second time."""
        self._count, self._since = self._count - 1, self._since - 1
        self._mixed = self._before
        self._latest.pop()

    def after_backward(self) -> None:
        """Compare the next calls that train."""
        self._since = 0

    @property
    def number(self) -> int:
        return mixed(self._mixed, self._count)

    @property
    def lines(self) -> list[str]:
        first = self._count - len(self._latest) + 1
        return [f"call {first + i}: {line}" for i, line in enumerate(self._latest)]


LOOK = 1.0  # seconds for which counts stand still before they are told


def name_of(members: Sequence[int]) -> str:
    """The name of a group of ranks in messages."""
    return hashlib.sha256(repr(tuple(members)).encode()).hexdigest()[:12]


def also(ranks: Sequence[int]) -> str:
    """The end of a sentence about one rank that is missing, of all others that are: ", nor did
    ranks 1, 4 to 6"."""
    ordered = sorted(ranks)
    starts = [at for at, rank in enumerate(ordered) if at == 0 or ordered[at - 1] != rank - 1]
    runs = [ordered[a:b] for a, b in pairwise([*starts, len(ordered)])]
    said = ", ".join(f"{run[0]} to {run[-1]}" if run[1:] else f"{run[0]}" for run in runs)
    return f", nor did rank{'s' * (len(ordered) > 1)} {said}" if said else ""


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
            Background("progress", self._watch)

    def undo(self, groups: Sequence[str]) -> None:
        """Take back a region that failed by itself, before the others would meet it there."""
        for name in groups:
            self.counts[name] -= 1
        self._changes += 1

    def _watch(self, over: threading.Event) -> None:
        seen = -1
        while not over.wait(LOOK):
            still, seen = seen == self._changes, self._changes
            if still and not self._tell():
                return
