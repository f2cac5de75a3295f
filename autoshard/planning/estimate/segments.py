"""Segments of a forward pass: no value is computed again across the border of two.

Were chains of recomputation free to be as long as they like, keeping nothing would cost one more
forward pass at most, and gain nothing: at its end all is there that was not to be kept. Within a
segment (a layer, or half of one) what is computed again is gone before the segment before it needs
the room. Borders lie where little crosses: between two peaks of the bytes that are alive, each at
least twice what is alive at the border; none lies inside a region of the user's.
"""

from __future__ import annotations

from collections.abc import Sequence

from autoshard.planning.estimate.recomputable import RankValue

_PROMINENCE = 2


def segments_of(values: Sequence[RankValue]) -> list[int]:
    """The number of the segment of each value, from 0, in order."""
    alive = _alive(values)
    borders: list[int] = []
    lowest, highest, falls = 0, 0, False
    for i, size in enumerate(alive):
        if falls:
            if size < alive[lowest]:
                lowest = i
            if size >= _PROMINENCE * alive[lowest] and size:
                borders.append(lowest)
                highest, falls = i, False
        else:
            if size > alive[highest]:
                highest = i
            if alive[highest] and size * _PROMINENCE <= alive[highest]:
                lowest, falls = i, True
    inside = _inside_regions(values)
    borders = [border for border in borders if border not in inside]
    found, segment = [], 0
    for i in range(len(values)):
        if segment < len(borders) and i == borders[segment]:
            segment += 1
        found.append(segment)
    return found


def merged(segments: Sequence[int], count: int) -> list[int]:
    """Segments with `count` neighbours as one each; the last stays alone.

    In the last nothing is computed again, whatever its size: all of it is needed at once.
    """
    last = segments[-1] if segments else 0
    joined = [segment // count for segment in segments]
    after = max((one for one, own in zip(joined, segments) if own != last), default=-1) + 1
    return [after if own == last else one for one, own in zip(joined, segments)]


def _inside_regions(values: Sequence[RankValue]) -> set[int]:
    """The positions in the user's regions of activation checkpointing, but the first of each."""
    ends: dict[int, tuple[int, int]] = {}
    for i, one in enumerate(values):
        if one.again >= 0:
            ends[one.again] = (ends.get(one.again, (i, i))[0], i)
    return {i for first, last in ends.values() for i in range(first + 1, last + 1)}


def _alive(values: Sequence[RankValue]) -> list[int]:
    """Bytes that cross to each value from those before it, to be read there or later."""
    change = [0] * (len(values) + 1)
    last = [-1] * len(values)
    for i, one in enumerate(values):
        for source in one.sources:
            last[source] = i
    for i, one in enumerate(values):
        if last[i] > i:
            change[i + 1] += one.nbytes
            change[last[i] + 1] -= one.nbytes
    alive, total = [], 0
    for i in range(len(values)):
        total += change[i]
        alive.append(total)
    return alive
