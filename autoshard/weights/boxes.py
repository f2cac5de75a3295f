"""Boxes of a tensor's elements: what a rank holds, wants or sends of it, in the whole's indices."""

import math
from collections.abc import Iterable, Iterator

import torch

Box = tuple[tuple[int, int], ...]
"""For each dim the first index, and one past the last."""


def elements(box: Box) -> int:
    """The number of elements of a box; 1 of a scalar's."""
    return math.prod(high - low for low, high in box)


def common(a: Box, b: Box) -> Box | None:
    """What two boxes of one tensor share; None where that is nothing."""
    found = tuple((max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(a, b, strict=True))
    return found if all(low < high for low, high in found) else None


def without(box: Box, other: Box) -> Iterator[Box]:
    """The elements of a box that are not in another, as boxes that share none."""
    both = common(box, other)
    if both is None:
        if elements(box):
            yield box
        return
    for dim, ((low, high), (start, end)) in enumerate(zip(box, both)):
        for part in ((low, start), (end, high)):
            if part[0] < part[1]:
                yield (*both[:dim], part, *box[dim + 1 :])


def apart(boxes: Iterable[Box]) -> list[Box]:
    """The elements of some boxes as boxes that share none."""
    found: list[Box] = []
    for box in boxes:
        new = [box] if elements(box) else []
        for before in found:
            new = [rest for one in new for rest in without(one, before)]
        found += new
    return found


def slices(box: Box, most: int) -> Iterator[Box]:
    """A box in slices along its outermost dims, each of `most` elements at most, but of one."""
    dim = next((i for i, (low, high) in enumerate(box) if high - low > 1), None)
    if elements(box) <= most or dim is None:
        yield box
        return
    low, high = box[dim]
    row = elements(box) // (high - low)
    step = max(1, most // row)
    for start in range(low, high, step):
        part = (*box[:dim], (start, min(high, start + step)), *box[dim + 1 :])
        yield from slices(part, most) if step == 1 else [part]


def cut(box: Box, size: int) -> tuple[Box | None, Box | None]:
    """The first slices of a box along its outermost dim, of about `size` elements, and the rest."""
    dim = next((i for i, (low, high) in enumerate(box) if high - low > 1), None)
    rows = 0 if dim is None else round(size * (box[dim][1] - box[dim][0]) / elements(box))
    if dim is None or not 0 < rows < box[dim][1] - box[dim][0]:
        return (box, None) if 2 * size >= elements(box) else (None, box)
    low, high = box[dim]
    parts = ((low, low + rows), (low + rows, high))
    return tuple((*box[:dim], part, *box[dim + 1 :]) for part in parts)  # type: ignore[return-value]


def view(part: torch.Tensor, at: Box, box: Box) -> torch.Tensor:
    """A box, as a view of a tensor that is the box `at`."""
    for dim, ((start, _), (low, high)) in enumerate(zip(at, box, strict=True)):
        part = part.narrow(dim, low - start, high - low)
    return part


def box_of(given: list[list[int]]) -> Box:
    """A box that travelled as lists."""
    return tuple((low, high) for low, high in given)
