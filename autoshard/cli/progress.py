"""How far a command is, on stderr."""

from __future__ import annotations

import sys

LINES = 20
"""The most lines, or one more, that a pipe is sent for one piece of work."""


class ProgressLine:
    """`[done/total] what`: one line that is rewritten on a terminal, a few lines elsewhere."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()

    def __call__(self, what: str, done: int, total: int) -> None:
        last = done == total
        if not self._terminal and not last and done % max(1, total // LINES):
            return
        start = "\r\x1b[K" if self._terminal else ""
        end = "" if self._terminal and not last else "\n"
        print(f"{start}[{done}/{total}] {what}", end=end, file=sys.stderr, flush=True)
