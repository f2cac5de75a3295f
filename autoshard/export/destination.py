"""A directory that appears complete or not at all, written by one process or by many."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from autoshard.export.errors import ExportError, export_error


class Destination:
    """A temporary directory beside `directory` that takes its place when all ranks succeeded.

    world, rank: of the processes that write; all see the same file system. `directory` may exist
    where it is empty. A file is written with `attempt`; `finish` ends, and is collective.
    """

    def __init__(self, directory: str | Path, world: int, rank: int) -> None:
        self.final = Path(directory)
        self.partial = self.final.with_name(f".{self.final.name}.partial")
        self._world, self._rank = world, rank
        self._error: Exception | None = None
        self.attempt(self._begin)
        self._agree()

    def _begin(self) -> None:
        if self.final.exists() and (not self.final.is_dir() or any(self.final.iterdir())):
            raise export_error(
                f"{self.final} exists", remedy="Remove it, or give another directory."
            )
        if self._rank == 0:
            shutil.rmtree(self.partial, ignore_errors=True)
            self.partial.mkdir(parents=True)

    def attempt(self, action: Callable[[], None]) -> None:
        """Run `action`, unless an earlier one failed; its error is raised by `finish`.

        The other ranks go on to the next collective, where this one must be too.
        """
        if self._error is None:
            try:
                action()
            except Exception as error:
                self._error = error

    def finish(self) -> None:
        """Move the directory to its place; or remove it, and raise, where a rank failed."""
        self._agree()
        self.attempt(self._move)
        self._agree()

    def abandon(self) -> None:
        """Remove what is written so far; not collective."""
        if self._rank == 0:
            shutil.rmtree(self.partial, ignore_errors=True)

    def _move(self) -> None:
        if self._rank == 0:
            self.partial.replace(self.final)

    def _agree(self) -> None:
        """Raise on every rank where one has failed."""
        said: list[str | None] = [None if self._error is None else str(self._error)]
        if self._world > 1:
            said = [None] * self._world
            mine = None if self._error is None else f"{type(self._error).__name__}: {self._error}"
            dist.all_gather_object(said, mine)
        failed = [(rank, text) for rank, text in enumerate(said) if text is not None]
        if not failed:
            return
        self.abandon()
        if self._error is not None:
            raise self._error
        raise ExportError(f"rank {failed[0][0]} failed: {failed[0][1]}")
