"""The processes that export together, and the one way a failure of one of them reaches all."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from autoshard.export.errors import ExportError
from autoshard.runtime.agreement import gather
from autoshard.runtime.collectives import Axis

T = TypeVar("T")

ALONE = Axis("world", 1, 0, "")
"""The job of one process that exports by itself."""


def on_every_rank(action: Callable[[], T], what: str, job: Axis) -> T:
    """The result of `action`, which every rank of the job runs; an error on one is one on all.

    A rank that fails raises its own error, the others an ExportError with it. what: names the
    action in the errors of ranks that wait for one that does not come. Collective over the job.
    """
    error: Exception | None = None
    try:
        result = action()
    except Exception as caught:
        error = caught
    failures = gather(None if error is None else f"{type(error).__name__}: {error}", what, job)
    if error is not None:
        raise error
    for rank, failure in enumerate(failures):
        if failure is not None:
            raise ExportError(f"rank {rank} failed: {failure}")
    return result
