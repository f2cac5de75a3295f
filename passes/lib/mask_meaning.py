"""What a mask of attention means, of its index function: causal, nothing hidden, or the keys that
are in a query's window, in its document, and no padding.

The proof is of every entry, for every value of symbolic sizes. A condition is affine in (query,
key), so its extremes over a triangle of pairs are at the corners.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from autoshard.passes.lib.index_functions import IndexFunctions, NotIndexed, input_name
from autoshard.passes.lib.index_values import (
    Affine,
    Condition,
    Difference,
    Elements,
    Holds,
    Value,
    affine,
    flipped,
)
from autoshard.planning import Size, inputs_of, packet, same

aten = torch.ops.aten

CAUSAL, EVERYTHING, DENSE = "causal", "none", "dense"


class Ranges(NamedTuple):
    """What a causal mask lets through besides: keys in a window of so many tokens, with a query's
    own; of its document, a number of each token that changes where another begins; visible ones."""

    window: int | None = None
    documents: fx.Node | None = None
    visible: fx.Node | None = None

    @property
    def name(self) -> str:
        """For `explain`."""
        kinds = {"window": self.window, "documents": self.documents, "padding": self.visible}
        return ", ".join(kind for kind, given in kinds.items() if given is not None)


class Meaning(NamedTuple):
    """The meaning, why, and what is let through; None where `meaning` says it all."""

    meaning: str
    reason: str
    ranges: Ranges | None = None


class Dense(Exception):
    """Nothing is proven of a mask; the text says why."""


def proven(value: Value, mask: torch.Tensor, functions: IndexFunctions) -> Meaning:
    """The meaning of a mask with these values; of `mask`, the shape and the dtype count.

    functions: of the graph, which know where unknown values come from. Raises NotIndexed, and Dense
    where nothing is proven."""
    shuts = [False] if mask.dtype == torch.bool else [torch.finfo(mask.dtype).min, -torch.inf]
    opens = mask.dtype == torch.bool  # True, or 0.0
    if isinstance(value, Elements):
        raise functions.unknown[value.source]
    if isinstance(value, Affine):
        if value.constant and value.offset == opens:
            return Meaning(EVERYTHING, "it hides nothing")
        raise Dense(f"every entry is {value.offset}")
    if value.no == opens:
        value = flipped(value)
    if value.yes != opens or value.no not in shuts:
        raise Dense(f"its entries are {value.yes} and {value.no}")
    if mask.dim() < 2 or not same(mask.shape[-1], mask.shape[-2]):
        raise Dense(f"its last dims are {' x '.join(map(str, mask.shape[-2:]))}, not equal")
    size = mask.shape[-1]
    documents, inside = _documents(value.conditions, mask, functions)
    visible = _visible(value.conditions, mask, functions)
    if visible is not None and not opens and value.no != -torch.inf:
        raise Dense("a query that sees no key would attend to all alike")
    conditions = [c for c in value.conditions if isinstance(c, Condition)] + inside
    window: int | None = None
    for condition in conditions:
        if any(condition.left.slopes[:-2]):
            raise Dense("it differs by head or by sequence")
        if not _on_past(condition, size):
            reach = _reach(condition)
            window = reach if window is None else min(reach, window)
    causal = any(_never_on_future(condition, size) for condition in conditions)
    if not causal and (window, documents, visible) == (None, None, None):
        if all(_everywhere(condition, size) for condition in conditions):
            return Meaning(EVERYTHING, "it hides nothing")
    if not causal and window is None:
        raise Dense("it hides some of the keys after each query's own")
    if window is not None:
        told = _of_window(window, size)
        if not causal or window < 1:
            raise Dense(told)
    ranges = Ranges(window, documents, visible)
    if ranges == Ranges():
        return Meaning(CAUSAL, "it lets through the keys up to each query's own")
    said = [] if window is None else [told]
    given = [_sources(one) for one in (documents, visible) if one is not None]
    said += [f"by {one}, whose values only a call knows" for one in given]
    return Meaning(ranges.name, "; ".join(said), ranges)


def _of_window(window: int, size: Size) -> str:
    if isinstance(size, int):
        return f"a window of {window} tokens is shorter than the sequence of {size}"
    return f"a window of {window} tokens, and the length of the sequence is symbolic"


# What only a call knows


def _documents(
    conditions: Sequence[Any], mask: torch.Tensor, functions: IndexFunctions
) -> tuple[fx.Node | None, list[Condition]]:
    """The numbers of documents that queries and keys must share, and the comparisons of positions
    in them as such of the tokens: inside of a document both count up alike."""
    found: fx.Node | None = None
    batch, inside = None, []
    unequal = []
    for one in conditions:
        if not isinstance(one, Difference):
            continue
        if not one.equal:
            unequal.append(one)
            continue
        query, key = (_token(e, mask) for e in (one.more, one.less))
        if {query, key} != {mask.dim() - 2, mask.dim() - 1} or one.more.offset != one.less.offset:
            raise functions.unknown[one.more.source]
        if one.more.index[:-1] != one.less.index[:-1] or found not in (None, one.more.source):
            raise functions.unknown[one.more.source]
        found, batch = one.more.source, one.more.index[:-1]
        if not _in_order(found):
            raise Dense(f"{_sources(found)}: not known to put documents one after the other")
    positions = None if found is None else _counted(found, functions)
    for one in unequal:
        alike = one.more.index[:-1] == one.less.index[:-1] == batch
        if positions is None or one.more.source is not positions or not alike:
            raise functions.unknown[one.more.source]
        left, right = one.more.index[-1], one.less.index[-1]
        slopes = [a - b for a, b in zip(left.slopes, right.slopes)]
        offset = left.offset - right.offset + one.more.offset - one.less.offset
        inside.append(Condition(affine(offset, slopes, mask.shape)))
    return found, inside


def _visible(
    conditions: Sequence[Any], mask: torch.Tensor, functions: IndexFunctions
) -> fx.Node | None:
    """The booleans of the keys that are not hidden."""
    every = [one.elements for one in conditions if isinstance(one, Holds)]
    if not every:
        return None
    if len(every) > 1 or _token(every[0], mask) != mask.dim() - 1:
        raise functions.unknown[every[0].source]
    return every[0].source


def _token(elements: Elements, mask: torch.Tensor) -> int | None:
    """The dim of the mask along which the last dim of the elements goes, token by token, and their
    first dim, if they have two, by sequence; None for any other elements."""
    *batch, token = elements.index
    size = elements.source.meta["val"].shape
    along = [d for d, slope in enumerate(token.slopes) if slope]
    if len(along) != 1 or token != Affine(0, _unit(along[0], mask)):
        return None
    if not same(size[-1], mask.shape[along[0]]):
        return None
    if batch and batch[0] != Affine(0, (0,) * mask.dim()):
        if mask.dim() != 4 or batch[0] != Affine(0, _unit(0, mask)):
            return None
        if not same(size[0], mask.shape[0]):
            return None
    elif batch and not same(size[0], 1):
        return None
    return along[0]


def _unit(dim: int, mask: torch.Tensor) -> tuple[int, ...]:
    return tuple(int(d == dim) for d in range(mask.dim()))


def _in_order(documents: fx.Node) -> bool:
    """Whether the numbers never fall along a sequence: sums of booleans."""
    if packet(documents) is not aten.cumsum:
        return False
    source, dim = documents.args[:2]
    val = source.meta["val"]  # type: ignore[union-attr]
    return val.dtype == torch.bool and dim in (-1, val.dim() - 1)


def _counted(documents: fx.Node, functions: IndexFunctions) -> fx.Node | None:
    """The positions that count up by one inside of each document: where the numbers are the sums of
    `positions.diff() != 1`."""
    (jumps,) = documents.all_input_nodes
    if packet(jumps) is not aten.ne or jumps.args[1] != 1:
        return None
    step: Any = jumps.args[0]
    if packet(step) is not aten.diff or (*step.args[1:3], 1)[0] != 1:
        return None
    try:
        found = functions.of(step.args[0])
    except NotIndexed:
        return None
    if not isinstance(found, Elements) or found.offset:
        return None
    *batch, token = found.index
    own = step.args[0].meta["val"].dim()
    dim = step.args[2] if len(step.args) > 2 else -1
    if dim not in (-1, own - 1) or token.offset or token.slopes != (*[0] * (own - 1), 1):
        return None
    return found.source


def _sources(node: fx.Node) -> str:
    """The inputs that a value is made of, by name."""
    return " and ".join(map(input_name, inputs_of(node))) or node.name


# Conditions over the triangles of pairs before and after the diagonal


def _on_past(condition: Condition, size: Size) -> bool:
    """Whether it holds at every 0 <= key <= query < size."""
    at, query, key = _parts(condition)
    if condition.equal:
        return at == query == key == 0
    if isinstance(size, int):
        last = size - 1
        return min(at, at + query * last, at + (query + key) * last) >= 0
    return min(at, query, query + key) >= 0


def _never_on_future(condition: Condition, size: Size) -> bool:
    """Whether it fails at every 0 <= query < key < size."""
    if condition.equal:
        return False
    at, query, key = _parts(condition)
    if isinstance(size, int):
        last = size - 1
        corners = [at + key, at + key * last, at + query * (last - 1) + key * last]
        return last == 0 or max(corners) < 0
    return at + key < 0 and key <= 0 and query + key <= 0


def _everywhere(condition: Condition, size: Size) -> bool:
    at, query, key = _parts(condition)
    if condition.equal or not isinstance(size, int):
        return at == query == key == 0 or (not condition.equal and min(at, query, key) >= 0)
    last = size - 1
    return at + min(0, query * last) + min(0, key * last) >= 0


def _parts(condition: Condition) -> tuple[Any, int, int]:
    return condition.left.offset, *condition.left.slopes[-2:]  # type: ignore[return-value]


def _reach(condition: Condition) -> int:
    """How many keys a window lets through, a query's own among them."""
    at, query, key = _parts(condition)
    if condition.equal or key <= 0 or query != -key:
        raise Dense("it hides keys before a query's own")
    return int(at // key) + 1
