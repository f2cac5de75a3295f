"""Ranks compare what they are about to do, before any of them does it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import torch.distributed as dist

from autoshard.runtime import compat
from autoshard.runtime.axis import Axis
from autoshard.runtime.errors import PlanMismatchError, message

_MISSING = "(nothing)"


def agree(what: str, digest: str, detail: Sequence[str], axis: Axis) -> None:
    """Return where all ranks of `axis` gave the same digest; raise PlanMismatchError on all of
    them where they did not.

    what: the thing compared, for the error text. digest: a hash of it. detail: its lines; they
    are exchanged only where digests differ, to name the first line that does.

    Every rank of the axis must call it: one that fails before it makes the others wait. Does
    nothing on an axis of size 1, or one that has no process group (offline, lockstep).
    """
    if axis.size == 1 or ":" in axis.group:
        return
    digests = _exchange(digest, axis)
    if len(set(digests)) == 1:
        return
    details: list[list[str]] = _exchange(list(detail), axis)
    for number, lines in enumerate(zip_longest(*details, fillvalue=_MISSING)):
        if len(set(lines)) > 1:
            said = "; ".join(f"rank {rank}: {line}" for rank, line in enumerate(lines))
            difference = f"line {number + 1} is the first that differs: {said}"
            break
    else:
        said = ", ".join(f"rank {rank}: {text}" for rank, text in enumerate(digests))
        difference = f"their lines are equal and their digests are not: {said}"
    raise PlanMismatchError(
        message(
            f"the ranks of axis {axis.name} disagree on the {what}; {difference}",
            remedy="Build the same model, with the same options and library versions, and call "
            "it with inputs of the same shapes on every rank.",
        )
    )


def from_first(value: Any, axis: Axis) -> Any:
    """The picklable value that the first rank of the axis gave; collective over the axis.

    `value` itself on an axis of size 1, or one that has no process group (offline, lockstep).
    """
    if axis.size == 1 or ":" in axis.group:
        return value
    values = [value]
    with compat.real_tensors():
        dist.broadcast_object_list(values, group=compat.process_group(axis.group), group_src=0)
    return values[0]


def _exchange(value: Any, axis: Axis) -> list[Any]:
    values: list[Any] = [None] * axis.size
    with compat.real_tensors():
        dist.all_gather_object(values, value, group=compat.process_group(axis.group))
    return values
