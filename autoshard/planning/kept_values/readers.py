"""The readers of a value, and what the table of each knows of the others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autoshard.planning.kept_values.fates import ReadValue
from autoshard.runtime.collectives import State, forward_value


@dataclass(frozen=True)
class ValueReader:
    """A reader of a value. of: equal where `wanted` is. place: its segment; -1 where it makes
    nothing."""

    variable: int
    of: tuple[int, int]
    wanted: tuple[State, ...]
    read: tuple[bool, ...]
    view: bool
    place: int

    def alike(self, start: int, last: int) -> object:
        """Equal for readers of equal values with equal tables. start: the value's segment."""
        place = 0 if self.view else self.place - start
        return self.of, self.read, self.view, place, self.place == last


def edges(
    value: tuple[tuple[State, ...], tuple[int, ...], tuple[State, ...] | None, tuple[int, ...]],
    found: Sequence[ValueReader],
    fates: Sequence[tuple[int, ...]],
    start: int,
    last: int,
    uses: int,
) -> Iterator[ReadValue]:
    """A value and each of its readers. value: the first four of a `ReadValue`. fates: of each
    reader. start, last: the value's segment and the last. uses: readers, and outputs."""
    have, own, copies, again = value
    of = [one for one in found if not one.view]
    held = [{forward_value(want): None for want in one.wanted} for one in of]
    for one, reader in zip(found, fates):
        beside = [other for other in of if other is not one]
        yield ReadValue(
            have=have,
            fates=own,
            copies=copies,
            again=again,
            wanted=one.wanted,
            read=one.read,
            near=tuple(_near(want, beside, start) for want in one.wanted),
            alike=tuple(_alike(want, beside) for want in one.wanted),
            shared=tuple(_shared(want, held, uses, copies is not None) for want in one.wanted),
            reader=reader,
            view=one.view,
            place=0 if one.view else one.place - start,
            ends=one.place == last,
            others=any(other.place == start for other in beside),
        )


def _near(want: State, beside: list[ValueReader], start: int) -> frozenset[int]:
    """Segments, counted from `start`, of readers that may want the same value."""
    held = forward_value(want)
    return frozenset(
        one.place - start
        for one in beside
        if any(forward_value(other) == held for other in one.wanted)
    )


def _alike(want: State, beside: list[ValueReader]) -> tuple[State, ...]:
    """A state and the other names that readers may have for its value."""
    others = {other for one in beside for other in one.wanted}
    return tuple(sorted({want, *(s for s in others if forward_value(s) == forward_value(want))}))


def _shared(want: State, held: list[dict[State, None]], uses: int, copied: bool) -> int:
    """The readers that may share one change of state without the copy: were it all of them, the
    copy would be in that state."""
    count = sum(forward_value(want) in one for one in held)
    return max(1, count - (copied and count == uses))
