"""Calls of the process group's store that end, whatever has become of the process that holds it.

A TCPStore waits for the answer to a question without any limit: a host that is frozen would hold
every rank that asks. So questions are asked in a thread that is left behind where none comes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")

_HOLDER = "the process that holds it (rank 0, or torchrun's agent)"


class StoreLost(Exception):
    """The store does not answer any more; the text says why."""


def within(seconds: float, call: Callable[[], T]) -> T:
    """The result of `call`, or its error. Raises StoreLost where it has not returned in time, or
    has found the connection closed."""
    results: list[T] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            results.append(call())
        except BaseException as error:  # raised below, in the caller's thread
            errors.append(error)

    thread = threading.Thread(target=work, name="autoshard-store", daemon=True)
    thread.start()
    thread.join(seconds)
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
