"""A directory that appears complete or not at all, written by one process or by many."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from autoshard.export.errors import export_error
from autoshard.export.job import on_every_rank
from autoshard.runtime.collectives import Axis

Progress = Callable[[str, int, int], None]
"""Called with the name of what was written, how many are, and how many there will be."""


def check_vacant(directory: Path) -> None:
    """Raise ExportError for a directory that holds something, or a file of this name."""
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise export_error(f"{directory} exists", remedy="Remove it, or give another directory.")


class Destination:
    """A temporary directory beside `directory` that takes its place when all ranks succeeded.

    A context manager: at the end of the block the directory is moved to its place, or removed
    where anything failed on any rank; beginning and end are collective over the job, whose ranks
    all see one file system. A file is written with `attempt`.
    """

    def __init__(self, directory: str | Path, job: Axis) -> None:
        self.final = Path(directory)
        self.partial = self.final.with_name(f".{self.final.name}.partial")
        self._job = job
        self._error: Exception | None = None

    def attempt(self, action: Callable[[], object]) -> None:
        """Run `action`, unless an earlier one failed; its error is raised at the end of the block.

        The other ranks go on to the next collective, where this one must be too.
        """
        if self._error is None:
            try:
                action()
            except Exception as error:
                self._error = error

    def __enter__(self) -> Destination:
        try:
            on_every_rank(self._begin, "directory", self._job)
        except BaseException:
            self._abandon()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        try:
            if kind is None:
                on_every_rank(self._raise, "files", self._job)
                on_every_rank(self._move, "end of the export", self._job)
        finally:
            self._abandon()

    def _begin(self) -> None:
        check_vacant(self.final)
        if self._job.rank == 0:
            self._abandon()  # what an export that was killed has left
            self.partial.mkdir(parents=True)

    def _abandon(self) -> None:
        if self._job.rank == 0:
            shutil.rmtree(self.partial, ignore_errors=True)

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _move(self) -> None:
        if self._job.rank == 0:
            self.partial.replace(self.final)
