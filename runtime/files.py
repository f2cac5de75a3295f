"""Files of a user: read as what may hold anything, and written whole or not at all.

    body = read_json(path, "plan file", PlanError)
    size = body.entry("size").integer(1, MOST_RANKS)

Whatever is wrong in a file that a person hands over is an error of the reader's own class that
names the file, the entry, what it holds and what belongs there. A full disk leaves the file that is
written over as it was.
"""

from __future__ import annotations

import json
import os
import reprlib
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from autoshard.runtime.errors import AutoshardError, OutputError, message

MOST_BYTES = 2**28
"""Bytes of the largest file that is read as text."""

MOST_RANKS = 2**20
"""Ranks of the largest mesh: some ten times those of the largest machine there is."""

_short = reprlib.Repr()
_short.maxstring = 80


class FileEntry:
    """One value of a file. `place` is its path in it, such as `memory.gigabytes`."""

    def __init__(
        self,
        value: Any,
        file: str | os.PathLike[str],
        what: str,
        error: type[AutoshardError],
        remedy: str | None = None,
        place: str = "",
    ) -> None:
        self.value, self.place = value, place
        self._file, self._what, self._error, self._remedy = file, what, error, remedy

    def refused(self, wanted: str) -> AutoshardError:
        """The error that says what is there and what is wanted."""
        name = f"entry {self.place} is" if self.place else "its content is"
        kind = type(self.value).__name__
        text = f"the {self._what} {self._file}: {name} {_short.repr(self.value)} ({kind}), {wanted}"
        return self._error(text, remedy=self._remedy)

    def entries(self) -> dict[str, FileEntry]:
        """The entries of an object, by name."""
        if not isinstance(self.value, Mapping):
            raise self.refused("not an object of named entries")
        for name in self.value:
            if not isinstance(name, str):
                raise self.refused(f"and its name {_short.repr(name)} is no text")
        return {name: self._inner(value, name) for name, value in self.value.items()}

    def items(self) -> list[FileEntry]:
        """The values of a list."""
        if not isinstance(self.value, list):
            raise self.refused("not a list")
        return [self._inner(value, f"[{i}]") for i, value in enumerate(self.value)]

    def entry(self, name: str) -> FileEntry:
        """The entry of that name, which must be there."""
        found = self.entries().get(name)
        if found is None:
            within = f" in {self.place}" if self.place else ""
            raise self._error(
                f"the {self._what} {self._file} has no {name!r}{within}", remedy=self._remedy
            )
        return found

    def optional(self, name: str, default: Any) -> FileEntry:
        """The entry of that name, or one that holds `default`."""
        return self.entries().get(name) or self._inner(default, name)

    def only(self, names: Iterable[str]) -> None:
        """Refuse an entry of another name: a misspelt one would be passed over in silence."""
        known = list(names)
        for name, entry in self.entries().items():
            if name not in known:
                raise entry.refused(f"and is not known; there are {', '.join(known)}")

    def text(self, *allowed: str) -> str:
        """A text; one of `allowed` where they are given."""
        if not isinstance(self.value, str):
            raise self.refused("not a text")
        if allowed and self.value not in allowed:
            raise self.refused(f"not one of {', '.join(allowed)}")
        return self.value

    def integer(self, low: int, high: int) -> int:
        """An integer from `low` to `high`."""
        if isinstance(self.value, bool) or not isinstance(self.value, int):
            raise self.refused("not an integer")
        if not low <= self.value <= high:
            raise self.refused(f"not from {low} to {high}")
        return self.value

    def number(self, low: float, high: float) -> float:
        """A finite number from `low` to `high`."""
        if isinstance(self.value, bool) or not isinstance(self.value, (int, float)):
            raise self.refused("not a number")
        if not low <= self.value <= high:  # NaN is not
            raise self.refused(f"not from {low:g} to {high:g}")
        return float(self.value)

    def flag(self) -> bool:
        """True or false."""
        if not isinstance(self.value, bool):
            raise self.refused("not true or false")
        return self.value

    def _inner(self, value: Any, name: str) -> FileEntry:
        place = f"{self.place}{'.' if self.place and name[:1] != '[' else ''}{name}"
        return FileEntry(value, self._file, self._what, self._error, self._remedy, place)


def read_json(
    path: str | os.PathLike[str],
    what: str,
    error: type[AutoshardError],
    remedy: str | None = None,
    most: int = MOST_BYTES,
) -> FileEntry:
    """The value that a JSON file holds; NaN, Infinity and a name that comes twice are refused.

    what: a noun for the file in errors. error, remedy: of every refusal. most: bytes it may have.
    """
    return parsed(path, what, error, _json, "JSON", remedy, most)


def parsed(
    path: str | os.PathLike[str],
    what: str,
    error: type[AutoshardError],
    parse: Callable[[str], Any],
    language: str,
    remedy: str | None = None,
    most: int = MOST_BYTES,
) -> FileEntry:
    """The value that `parse` makes of a file's text; whatever it raises is an `error`."""
    text = read_text(path, what, error, most)
    try:
        value = parse(text)
    except RecursionError as deep:
        raise error(f"the {what} {path} is nested too deeply to be read", remedy=remedy) from deep
    except Exception as wrong:  # a parser of another project may raise anything
        raise error(f"the {what} {path} is not {language}: {wrong}", remedy=remedy) from wrong
    return FileEntry(value, path, what, error, remedy)


def read_text(
    path: str | os.PathLike[str], what: str, error: type[AutoshardError], most: int = MOST_BYTES
) -> str:
    """The text of a regular file of at most `most` bytes of UTF-8.

    Pipes and devices are refused: reading them may never end.
    """
    try:
        with open(path, "rb", opener=_without_waiting) as stream:
            found = os.fstat(stream.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise error(message(f"the {what} {path} is not a regular file"))
            if found.st_size > most:
                raise error(
                    message(
                        f"the {what} {path} has {found.st_size:,} bytes; at most {most:,} are read"
                    )
                )
            return stream.read(most).decode("utf-8-sig")
    except UnicodeDecodeError as wrong:
        raise error(message(f"the {what} {path} is not UTF-8: {wrong}")) from wrong
    except (OSError, ValueError) as wrong:  # ValueError: a name with a null byte
        if isinstance(wrong, AutoshardError):
            raise
        raise error(message(f"the {what} {str(path)!r} cannot be read: {wrong}")) from wrong


def own_bytes(path: str | os.PathLike[str], what: str, error: type[AutoshardError]) -> bytes:
    """The bytes of a file that nobody but this user and root may write or replace: they are code
    that is going to run."""
    try:
        real = Path(os.path.realpath(path))
        for part in (real, *real.parents):
            found = part.stat()
            shared = found.st_mode & 0o022 and not found.st_mode & stat.S_ISVTX
            if shared or found.st_uid not in (os.geteuid(), 0):
                raise error(
                    f"the {what} {path} is not read: others than this user may write to {part} "
                    f"(owner {found.st_uid}, mode {stat.filemode(found.st_mode)})",
                    remedy=f"Make it your own: chown, and chmod go-w {part}.",
                )
        return real.read_bytes()
    except OSError as wrong:
        if isinstance(wrong, AutoshardError):
            raise
        raise error(message(f"the {what} {str(path)!r} cannot be read: {wrong}")) from wrong


def _without_waiting(path: str, flags: int) -> int:
    """A pipe that nobody writes to would be opened only when somebody does."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def _json(text: str) -> Any:
    return json.loads(text, parse_constant=_no_constant, object_pairs_hook=_each_once)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"the name {twice!r} comes twice in one object")
    return made


def write_whole(path: str | os.PathLike[str], text: str, what: str) -> None:
    """Write a file beside `path`, and put it in its place. what: of the file, for the error.

    Raises OutputError, which is an OSError too, where the system refuses; what was at `path`
    is there still.
    """
    target = Path(os.path.realpath(path))  # of a link, the file that it stands for
    if target.exists() and not target.is_file():  # a pipe or a device, which nothing can replace
        target.write_text(text, encoding="utf-8")
        return
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        if target.exists():
            partial.chmod(target.stat().st_mode)
        os.replace(partial, target)
    except OSError as error:
        kept = "; the file that was there is as it was" if target.exists() else ""
        raise OutputError(
            f"the {what} {path} of {len(text.encode()):,} bytes cannot be written: "
            f"{error.strerror or error}{kept}",
            remedy="Make room there and allow this user to write, or give another path.",
        ) from error
    finally:
        partial.unlink(missing_ok=True)
