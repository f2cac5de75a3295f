"""What the fates of a value, of its shared copy and of a reader cost together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from autoshard.runtime.collectives import State, forward_value

UNREAD, KEPT, AGAIN = range(3)
ANY = (UNREAD, KEPT, AGAIN)


@dataclass(frozen=True)
class ReadValue:
    """A value and one of its readers.

    have: the value's state by strategy of its producer. fates: that it may have. copies: states of
    its shared copy; None: it has none. wanted: the state by strategy of the reader; read: whether
    its derivative reads it. reader: fates of what the reader makes. view: whether that is another
    name of the value. crosses: whether the reader is in another segment than the first reader.
    scale: of seconds in the reader's segment. shared: among how many readers a value may be shared
    that each is charged for alone: so no sum is above the true cost.
    """

    have: tuple[State, ...]
    fates: tuple[int, ...]
    copies: tuple[State, ...] | None
    wanted: tuple[State, ...]
    read: tuple[bool, ...]
    reader: tuple[int, ...]
    view: bool
    crosses: bool
    scale: float
    shared: int


def edge_table(
    edge: ReadValue,
    prices: Callable[[State, State], tuple[float, float]],
    change: Callable[[State, State], float],
) -> np.ndarray:
    """Seconds by pair of the producer, of the copy where there is one, and of the reader.

    prices: of a change of state, seconds for keeping its result and for doing it again. change:
    what the planner charges, by which readers choose between the value and its copy.
    """
    copies = edge.copies or (None,)
    copy_fates = ANY if edge.copies else (UNREAD,)
    shape = (len(edge.have), len(edge.fates), len(copies), len(copy_fates))
    table = np.zeros((*shape, len(edge.wanted), len(edge.reader)))
    if edge.view:
        _view(edge, table)
    else:
        for s, have in enumerate(edge.have):
            for c, copy in enumerate(copies):
                for w, want in enumerate(edge.wanted):
                    table[s, :, c, :, w] = _read(
                        edge, have, copy, want, edge.read[w], copy_fates, prices, change
                    )
    first, last = shape[0] * shape[1], len(edge.wanted) * len(edge.reader)
    whole = (first, last) if edge.copies is None else (first, shape[2] * shape[3], last)
    return table.reshape(whole)


def _view(edge: ReadValue, table: np.ndarray) -> None:
    """A view is there where its base is."""
    for f, fate in enumerate(edge.fates):
        for r, of_reader in enumerate(edge.reader):
            if fate == UNREAD and of_reader != UNREAD:
                table[:, f, :, :, :, r] = np.inf


def _read(
    edge: ReadValue,
    have: State,
    copy: State | None,
    want: State,
    read: bool,
    copy_fates: tuple[int, ...],
    prices: Callable[[State, State], tuple[float, float]],
    change: Callable[[State, State], float],
) -> np.ndarray:
    own, held = forward_value(have), forward_value(want)
    by_copy = copy is not None and copy not in (have, want)
    by_copy = by_copy and change(copy, want) < change(have, want)  # type: ignore[arg-type]
    of_copy = forward_value(copy) if copy is not None else None
    found = np.zeros((len(edge.fates), len(copy_fates), len(edge.reader)))
    for f, fate in enumerate(edge.fates):
        for k, copied in enumerate(copy_fates):
            from_copy = (by_copy or held == of_copy) and of_copy != own
            at = copied if from_copy else fate
            usable = at != UNREAD
            if from_copy and at == AGAIN and edge.crosses:
                found[f, k] = np.inf
                continue
            for r, of_reader in enumerate(edge.reader):
                needed = read or of_reader == AGAIN
                if not needed:
                    continue
                if held == (of_copy if from_copy else own):
                    found[f, k, r] = 0.0 if usable else np.inf
                else:
                    kept, again = prices(copy if from_copy else have, want)  # type: ignore[arg-type]
                    once = min(kept, again * edge.scale) if usable else kept
                    found[f, k, r] = once / edge.shared
    return found
