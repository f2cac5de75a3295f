"""Ranks compare what they are about to do, before any of them does it."""

import contextlib
import functools
import json
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist

from autoshard.runtime import compat
from autoshard.runtime.agreement.store_exchange import SAME, OtherExchange
from autoshard.runtime.agreement.whereabouts import PeerFailed
from autoshard.runtime.agreement.worlds import current_exchange
from autoshard.runtime.collectives import Axis
from autoshard.runtime.errors import AutoshardError, CollectiveError, PlanMismatchError, message

_MISSING = "(nothing)"
_FEW = 8  # values that differ, and ranks that have one of them, of which an error tells
REMEDY = (
    "Build the same model, with the same options and library versions, and call it with inputs of "
    "the same shapes on every rank. Where a model goes through a Python set, start all ranks with "
    "one PYTHONHASHSEED."
)
FAILED = (
    "See the output of that rank; if it has no error, compare the shapes of the ranks' batches, "
    "and their options. Then start all processes again."
)


def agree(
    what: str,
    digest: str,
    detail: Sequence[str],
    axis: Axis,
    *,
    note: str = "",
    error: type[AutoshardError] = PlanMismatchError,
    remedy: str = REMEDY,
) -> None:
    """Return where all ranks of `axis` gave the same digest; raise `error` on all of them where
    they did not.

    what: the thing compared, for the error text; note: more of it, such as the shapes of the call,
    for ranks that turn out to be at different things. digest: a hash of it. detail: its lines;
    they are exchanged only where digests differ, of one rank for each digest, to name the first
    line that does. remedy: what to do about a difference, and about a rank that does not come.

    Every rank of the axis must call it; where one does not, because it failed, ended, or waits
    elsewhere, the others raise too. Does nothing on an axis of size 1, or one that has no process
    group (offline, lockstep).
    """
    if axis.size == 1 or ":" in axis.group:
        return
    ask_for = functools.partial(
        _exchange,
        what=what,
        axis=axis,
        here=f"{what} ({note})" if note else what,
        error=error,
        remedy="" if remedy is REMEDY else remedy,
    )
    kinds = ask_for(digest, vote=digest, combine=_kinds)
    if kinds is SAME:
        return
    first = [places[0] for _, places, _ in kinds]
    mine = list(detail) if axis.rank in first else None
    found = ask_for(mine, combine=functools.partial(_first_difference, first))
    if found is None:
        said = ", ".join(f"{_ranks(axis, at, n)}: {text}" for text, at, n in kinds)
        difference = f"their lines are equal and their digests are not: {said}"
    else:
        alike: dict[str, tuple[list[int], int]] = {}
        for line, (_, at, n) in zip(found["lines"], kinds, strict=True):
            others, number = alike.get(line, ([], 0))
            alike[line] = sorted(others + at), number + n
        said = "; ".join(f"{_ranks(axis, *of)}: {line}" for line, of in alike.items())
        difference = f"line {found['number']} is the first that differs: {said}"
    what = f"the ranks of axis {axis.name} disagree on the {what}; {difference}"
    raise _failed(what, error, remedy)


def _kinds(values: Sequence[str]) -> list[tuple[str, list[int], int]]:
    """The first few different values, each with the first few places of those that gave it, and
    how many they are."""
    found: dict[str, list[int]] = {}
    for at, value in enumerate(values):
        if value in found or len(found) < _FEW:
            found.setdefault(value, []).append(at)
    return [(value, places[:_FEW], len(places)) for value, places in found.items()]


def _first_difference(
    places: Sequence[int], given: Sequence[Sequence[str]]
) -> dict[str, Any] | None:
    """The first line that differs between those given at these places: its number, and each one."""
    together = zip_longest(*(given[at] for at in places), fillvalue=_MISSING)
    for number, lines in enumerate(together, 1):
        if len(set(lines)) > 1:
            return {"number": number, "lines": lines}
    return None


def _ranks(axis: Axis, places: Sequence[int], number: int) -> str:
    """Some of the ranks of an axis, by their places there, for an error text."""
    ranks = members(axis)
    named = ", ".join(str(ranks[at]) for at in places[:_FEW])
    return f"rank{'s' * (number > 1)} {named}{', ...' * (number > len(places[:_FEW]))}"


def ask(number: int, axis: Axis) -> bool:
    """Whether all ranks of an axis with processes gave the same number, of 63 bits.

    What each step compares: a collective of 16 bytes of the host. Every rank must call it, in a
    `CollectiveRegion`, and `agree` where the numbers differ, for the error. Raises CollectiveError
    where a rank fails meanwhile: it may have caught that, and keep its connections.
    """
    most = torch.tensor([number, -number], device="cpu")
    group, most_of = compat.host_group(axis.group), dist.ReduceOp.MAX
    work, exchange = dist.all_reduce(most, most_of, group=group, async_op=True), current_exchange()
    while exchange is not None and not compat.is_done(work, exchange.seldom):
        if (failure := exchange.heard_of()) is not None:
            told = f"{failure}; rank {exchange.rank} waited in a comparison on axis {axis.name}"
            raise CollectiveError(told, remedy=FAILED)
    try:
        work.wait()
    except RuntimeError as error:
        error.add_note(f"a comparison on axis {axis.name}")
        raise
    return not most.sum().item()


def _failed(what: str, error: type[AutoshardError], remedy: str) -> AutoshardError:
    """An error that every rank of an axis raises at this moment; ranks of others hear of it."""
    raised = error(message(what, remedy=remedy))
    exchange = current_exchange()
    if exchange is not None:
        exchange.fail(exchange.rank, f"{error.__name__}: {raised}")
    return raised


def members(axis: Axis) -> list[int]:
    """The ranks of the world that an axis is made of, in its order."""
    return dist.get_process_group_ranks(compat.process_group(axis.group))


def gather(value: Any, what: str, axis: Axis, *, alike: bool = False) -> list[Any]:
    """The values that the ranks of the axis gave, in their order; anything that JSON holds.

    Collective over the axis; `[value]` on one of size 1 or without a process group. what: the name
    of it in the errors of ranks that wait. alike: whether the values are expected to be the same,
    which costs least. Raises PlanMismatchError where a rank does not come.
    """
    found = combined(value, what, axis, list, alike=alike)
    return [value] * axis.size if found is SAME else found


def combined(
    value: Any,
    what: str,
    axis: Axis,
    combine: Callable[[list[Any]], Any],
    *,
    alike: bool = False,
    note: str = "",
) -> Any:
    """What `combine` makes of the values that `gather` returns: one rank does, for all. SAME where
    they are expected to be alike and are. note: see `agree`."""
    if axis.size == 1 or ":" in axis.group:
        return SAME if alike else combine([value])
    vote = json.dumps(value) if alike else None
    here = f"{what} ({note})" if note else what
    return _exchange(value, what=what, axis=axis, here=here, vote=vote, combine=combine)


def world_axis() -> Axis:
    """All ranks of the running world as one axis, for `gather`."""
    if not dist.is_initialized():
        return Axis("world", 1, 0, "")
    group = dist.group.WORLD
    assert group is not None
    return Axis("world", dist.get_world_size(), dist.get_rank(), group.group_name)


def everyone(axes: Sequence[Axis]) -> Sequence[Axis]:
    """The axes on which all ranks of these are asked for what they have alike: one of the whole
    world where they make it, so that a host votes once, and not once for each of its ranks."""
    processes = all(":" not in axis.group for axis in axes)
    world = world_axis()
    return [world] if processes and math.prod(a.size for a in axes) == world.size else axes


def from_first(value: Any, what: str, axis: Axis, *, alike: bool = False) -> Any:
    """The value that the first rank of the axis gave; see `gather`."""
    given = value if axis.rank == 0 or alike else None
    found = combined(given, what, axis, operator.itemgetter(0), alike=alike)
    return value if found is SAME else found


@contextlib.contextmanager
def attempt() -> Iterator[None]:
    """A block of code that all ranks of a group run, such as a compilation.

    Whatever fails inside is told to the ranks that wait for this one in `agree`, who then raise
    PlanMismatchError with it. All of them raise it at each exchange from then on: after a failure
    that is caught, the processes must start again.
    """
    try:
        yield
    except compat.RESTARTS as error:  # nothing has failed
        compat.trace_again(error)
        raise
    except Exception as error:
        exchange = current_exchange()
        if exchange is not None:
            exchange.fail(exchange.rank, f"{type(error).__name__}: {error}")
        raise


def _exchange(
    value: Any,
    *,
    what: str,
    axis: Axis,
    combine: Callable[[list[Any]], Any],
    vote: str | None = None,
    here: str = "",
    error: type[AutoshardError] = PlanMismatchError,
    remedy: str = "",
) -> Any:
    exchange = current_exchange()
    if exchange is None:
        return combine([value] * axis.size) if vote is None else SAME
    before, here = exchange.failure, here or what
    try:
        return exchange.exchange(value, what, members(axis), here=here, vote=vote, combine=combine)
    except OtherExchange as apart:
        difference = f"the ranks of axis {axis.name} are at different things; {apart}"
        raise _failed(difference, error, remedy or REMEDY) from None
    except PeerFailed as failure:
        waited = f"rank {exchange.rank} waited for it at the {here} of axis {axis.name}"
        if failure.rank == exchange.rank:
            waited = f"this is rank {exchange.rank}, at the {here} of axis {axis.name}"
        elif before is not None:
            waited = f"rank {exchange.rank} came to the {here} of axis {axis.name} after that"
            error = PlanMismatchError  # whatever was to be compared here
        raise error(message(f"{failure}; {waited}", remedy=f"{remedy} {FAILED}".strip())) from None
