"""A directory that appears complete or not at all, written by one process or by many."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

from autoshard.export.errors import export_error
from autoshard.export.job import on_every_rank
from autoshard.export.target import check_target, reserved
from autoshard.runtime.agreement import from_first, gather
from autoshard.runtime.collectives import Axis

Progress = Callable[[str, int, int], None]
"""Called with the name of what was written, how many are, and how many there will be."""


class Destination:
    """A directory `partial` that takes the place of `directory` when all ranks succeeded.

    A context manager, entered before any work: a place that cannot be had is refused there. At the
    end of the block the directory is moved to its place, or removed where anything failed on any
    rank; beginning and end are collective over the job, whose ranks all see one file system. A
    file is written with `attempt`.
    """

    partial: Path

    def __init__(self, directory: str | Path, job: Axis) -> None:
        self._given = directory
        self._job = job
        self._error: Exception | None = None
        self._held = contextlib.ExitStack()

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
            self._target = on_every_rank(lambda: check_target(self._given), "directory", self._job)
            targets = gather(str(self._target), "directories", self._job)
            for rank, target in enumerate(targets):
                if target != targets[0]:
                    raise export_error(
                        f"rank 0 writes {targets[0]}, and rank {rank} {target}",
                        remedy="Give every rank of the job the same directory.",
                    )
            mine = on_every_rank(self._reserve, "beginning of the export", self._job)
            self.partial = Path(from_first(str(mine), "partial directory", self._job))
        except BaseException:
            self._held.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        with self._held:
            if kind is None:
                on_every_rank(self._raise, "files", self._job)
                on_every_rank(self._move, "end of the export", self._job)

    def _reserve(self) -> Path | None:
        """On rank 0: the directory that all ranks write."""
        if self._job.rank != 0:
            return None
        try:
            return self._held.enter_context(reserved(self._target))
        except OSError as error:
            raise export_error(f"{self._target} cannot be written to: {error}") from error

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _move(self) -> None:
        if self._job.rank != 0:
            return
        try:
            self.partial.rename(self._target)
        except OSError as error:
            raise export_error(
                f"{self._target} was made by somebody else while the export ran, and stays as it "
                f"is: {error}",
                remedy="Give another directory.",
            ) from error
