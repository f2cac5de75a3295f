"""The error of the exporters, where in the user's code a node comes from, and the one way a failure
of one process reaches all that export together.
"""

from collections.abc import Callable
from typing import TypeVar

from torch import fx

from autoshard.errors import AutoshardError, source_line
from autoshard.runtime.agreement import gather
from autoshard.runtime.collectives import Axis


class ExportError(AutoshardError):
    """A model that the target format cannot hold, or that cannot be written."""


def export_error(what: str, node: fx.Node | None = None, remedy: str | None = None) -> ExportError:
    """An error that names the node and the user's line where a node is to blame."""
    where = None
    if node is not None:
        what = f"{node.name}: {what}"
        where = source_line(node.meta.get("stack_trace"))
    return ExportError(what, where=where, remedy=remedy)


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
    said = None if error is None else f"{type(error).__name__}: {error}"
    failures = gather(said, what, job, alike=True)
    if error is not None:
        raise error
    for rank, failure in enumerate(failures):
        if failure is not None:
            raise ExportError(f"rank {rank} failed: {failure}")
    return result
