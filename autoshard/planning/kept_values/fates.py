"""What the fates of a value, of its shared copy and of a reader cost together.

A table knows of other readers only what is true in every placement. Where the placed graph could do
more, since one of them made the same change of state before, it is allowed here: no sum of tables
is above what the placed graph costs (tests/planning/test_kept_values.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np

from autoshard.runtime.collectives import State, forward_value

UNREAD, KEPT, AGAIN = range(3)
ANY = (UNREAD, KEPT, AGAIN)

ANYWHERE = -1
"""In the place of a segment: that of any reader."""

PriceChange = Callable[[State, State, bool], tuple[float, float]]
"""Of a change of state, and whether it is made in the last segment: seconds for keeping its result
and for doing it again."""


@dataclass(frozen=True)
class ReadValue:
    """A value and one of its readers. Segments are counted from that of the value.

    have: the value's state by strategy of its producer. fates: that it may have. copies: states of
    its shared copy; None: it has none. again: the segments in which that may be computed again,
    which are fates after UNREAD and KEPT. wanted: the state by strategy of the reader; read:
    whether its derivative reads it; near: segments of other readers that may want the same value;
    alike: names of that state that one of them may use; shared: how many at least are charged for
    it, if all keep it. reader: fates of what the reader makes. view: whether that is another name
    of the value. place: the reader's segment; ends: whether it is the last. others: whether another
    reader is in the value's segment.
    """

    have: tuple[State, ...]
    fates: tuple[int, ...]
    copies: tuple[State, ...] | None
    again: tuple[int, ...]
    wanted: tuple[State, ...]
    read: tuple[bool, ...]
    near: tuple[frozenset[int], ...]
    alike: tuple[tuple[State, ...], ...]
    shared: tuple[int, ...]
    reader: tuple[int, ...]
    view: bool
    place: int
    ends: bool
    others: bool


def edge_table(
    edge: ReadValue, prices: PriceChange, change: Callable[[State, State], float]
) -> np.ndarray:
    """Seconds by pair of the producer, of the copy where there is one, and of the reader.

    change: what the planner charges, by which readers choose between the value and its copy.
    """
    copies = edge.copies or (None,)
    copied = 2 + len(edge.again) if edge.copies else 1
    shape = (len(edge.have), len(edge.fates), len(copies), copied)
    table = np.zeros((*shape, len(edge.wanted), len(edge.reader)))
    if edge.view:
        _view(edge, table)
    else:
        for s, have in enumerate(edge.have):
            for c, copy in enumerate(copies):
                for w in range(len(edge.wanted)):
                    ways = {by_copy(have, copy, want, change) for want in edge.alike[w]}
                    each = [_read(edge, have, copy, w, way, copied, prices) for way in ways]
                    table[s, :, c, :, w] = np.minimum.reduce(each)
    first, last = shape[0] * shape[1], len(edge.wanted) * len(edge.reader)
    whole = (first, last) if edge.copies is None else (first, shape[2] * shape[3], last)
    return table.reshape(whole)


def by_copy(
    have: State, copy: State | None, want: State, change: Callable[[State, State], float]
) -> bool:
    """Whether a reader takes the copy on the way to another state."""
    if copy is None or copy in (have, want) or forward_value(copy) == forward_value(have):
        return False
    return change(copy, want) < change(have, want)


def _view(edge: ReadValue, table: np.ndarray) -> None:
    """A view is there where its base is; one that says whether that is computed again has AGAIN."""
    tells = AGAIN in edge.reader
    for f, fate in enumerate(edge.fates):
        for r, of_reader in enumerate(edge.reader):
            if tells and (fate == AGAIN) != (of_reader == AGAIN):
                table[:, f, :, :, :, r] = np.inf
            if fate == UNREAD and of_reader != UNREAD:
                table[:, f, :, :, :, r] = np.inf


def _read(
    edge: ReadValue,
    have: State,
    copy: State | None,
    w: int,
    through: bool,
    copied: int,
    prices: PriceChange,
) -> np.ndarray:
    """By fate of the value, of its copy and of the reader. through: whether the copy is on the way
    to another state."""
    own, want = forward_value(have), edge.wanted[w]
    held, of_copy = forward_value(want), None if copy is None else forward_value(copy)
    itself, shares = held == own, held == of_copy
    through = not itself and (through or shares)
    near = edge.others if through else not itself and 0 in edge.near[w]
    found = np.zeros((len(edge.fates), copied, len(edge.reader)))
    once = (0.0, 0.0)
    if not itself and not shares:
        ends = edge.ends and not any(place < edge.place for place in edge.near[w])
        once = prices(copy if through else have, want, ends)  # type: ignore[arg-type]
    for f, fate in enumerate(edge.fates):
        for k in range(copied):
            if fate == AGAIN and edge.place and not near:
                found[f, k] = np.inf  # what another segment reads
            elif through and not _may_read(edge, k, () if shares else edge.near[w]):
                found[f, k] = np.inf
            else:
                there = (k if through else fate) != UNREAD
                seconds = _there(there, once, itself or shares) / edge.shared[w]
                for r, of_reader in enumerate(edge.reader):
                    found[f, k, r] = seconds if edge.read[w] or of_reader == AGAIN else 0.0
    return found


def _there(there: bool, once: tuple[float, float], unmoved: bool) -> float:
    """What a reader pays so that what it reads is there. there: whether the source of that is."""
    if unmoved:
        return 0.0 if there else math.inf
    return min(once) if there else once[0]


def _may_read(edge: ReadValue, fate: int, near: Collection[int]) -> bool:
    """Whether a copy with a fate may be read: computed again, in its own segment only."""
    if fate < AGAIN:
        return True
    place = edge.again[fate - AGAIN]
    return place in (ANYWHERE, edge.place, *near)
