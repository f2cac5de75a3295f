"""The collectives of graphs that a rank has run with a group of ranks, to be compared with theirs.

Data-parallel ranks have batches of their own, and may take other branches: two ranks that run other
graphs gather or reduce other parameters with each other, and where those are of one size nothing
fails. The ranks compare all calls so far before each of the first few that train after a backward.
Else it would cost too many messages, and they do at the first, second, fourth, eighth... and at
every 256th: a difference stays one, as the hash of a call is mixed with that of all before it.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Sequence

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

    def add(self, call: Call, trains: bool = False) -> bool:
        """Whether the ranks are to compare their histories now, before this call's collectives."""
        self._count, self._since = self._count + 1, self._since + 1
        self._before, self._mixed = self._mixed, mixed(self._mixed, call.number)
        self._latest.append(call.line)
        early = trains and self._since <= TRAINING
        if not early and self._count & (self._count - 1) and self._count % EVERY:
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
