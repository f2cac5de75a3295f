"""The rule by which each operator carries an axis, from its operands to its result.

An operator that computes each place of the axis from the same place of its operands carries it; any
other mixes places, and so does each that has no rule here.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from autoshard.export.rank_graph.core_operators import OVER_DIMS, POINTWISE
from autoshard.export.rank_graph.evaluation import (
    Mixed,
    Place,
    cut,
    depends,
    reads,
    reshaped,
    shape_of,
    size_of,
)
from autoshard.export.rank_graph.operators import attention
from autoshard.passes import permutation
from autoshard.planning import arguments

aten = torch.ops.aten
_c10d = torch.ops._c10d_functional


@dataclass(frozen=True)
class Carrier:
    """The places of one axis in the values of a graph.

    numbers: of each symbol. axis: its size in them. symbol: that size in the graph, None where it
    is a number. place: of a node, None where its value has nothing of the axis.
    """

    numbers: Mapping[str, int]
    axis: int
    symbol: str | None
    place: Callable[[fx.Node], Place | None]

    def result(self, node: fx.Node) -> Place | None:
        """The place in the result of a call. Raises Mixed."""
        rule = _RULES.get(node.target)
        if rule is None:
            if any(self.place(other) for other in node.all_input_nodes):
                raise Mixed(f"({node.target}) may look at others")
            return None
        place = rule(self, node)
        if self.symbol is not None:
            self._check_sizes(node, self.symbol, place)
        return place

    def _check_sizes(self, node: fx.Node, symbol: str, place: Place | None) -> None:
        """The size of the axis may say how large the result is, and nothing else."""
        sizes = [n for n in node.all_input_nodes if not _is_tensor(n) and reads(n, symbol)]
        if sizes and node.target not in _SIZED:
            raise Mixed("computes with the number of tokens")
        if _is_tensor(node):
            for dim, extent in enumerate(node.meta["val"].shape):
                if depends(extent, symbol) != (place is not None and place.dim == dim):
                    raise Mixed("has as many entries as there are tokens, beside the tokens")

    def shape(self, node: Any) -> tuple[int, ...]:
        return shape_of(node, self.numbers)

    def of(self, value: Any) -> Place | None:
        return self.place(value) if isinstance(value, fx.Node) else None

    def number(self, value: Any) -> int:
        return size_of(value.meta["val"] if isinstance(value, fx.Node) else value, self.numbers)

    def broadcast(self, values: Sequence[Any], rank: int, kept: int = 0) -> Place | None:
        """The place in a result of `rank` dims to which operands are broadcast from the right.

        kept: how many of the last dims are not broadcast; a place in them is none of this.
        """
        found: Place | None = None
        for value in values:
            place = self.of(value)
            if place is None:
                continue
            moved = replace(place, dim=place.dim + rank - len(self.shape(value)))
            if moved.dim >= rank - kept:
                continue
            if found not in (None, moved):
                raise Mixed("pairs tokens with tokens")
            found = moved
        if found is not None:
            for value in values:
                if isinstance(value, fx.Node) and self.of(value) is None:
                    shape = self.shape(value) if _is_tensor(value) else ()
                    dim = found.dim - rank + len(shape)
                    if dim >= 0 and shape[dim] not in (1, self.axis):
                        raise Mixed("meets a tensor of as many entries as there are tokens")
        return found


Carries = Callable[[Carrier, fx.Node], Place | None]


def _is_tensor(value: Any) -> bool:
    return isinstance(value, fx.Node) and isinstance(value.meta.get("val"), torch.Tensor)


def _rank(node: fx.Node) -> int:
    return len(node.meta["val"].shape)


def _product(self: Carrier, node: fx.Node) -> Place | None:
    x, y = node.args[-2:] if node.target is aten.addmm.default else node.args[:2]
    if node.target is aten.addmm.default and self.of(node.args[0]) is not None:
        raise Mixed("adds what belongs to tokens to a product")
    rank = _rank(node)
    sizes = [len(self.shape(value)) for value in (x, y)]
    if min(sizes) < 2 and (self.of(x) or self.of(y)):
        raise Mixed("is a product of vectors")
    place, other = self.of(x), self.of(y)
    rows = place is not None and place.dim == sizes[0] - 2
    columns = other is not None and other.dim == sizes[1] - 1
    for value, size, dim in ((place, sizes[0], -1), (other, sizes[1], -2)):
        if value is not None and value.dim == size + dim:
            raise Mixed("sums over tokens")
    outer = self.broadcast((x, y), rank, kept=2)
    found = [outer] if outer is not None else []
    if rows and place is not None:
        found.append(replace(place, dim=rank - 2))
    if columns and other is not None:
        found.append(replace(other, dim=rank - 1))
    if len(found) > 1:
        raise Mixed("pairs tokens with tokens")
    return found[0] if found else None


def _linear(self: Carrier, node: fx.Node) -> Place | None:
    place = self.of(node.args[0])
    if any(self.of(value) is not None for value in node.args[1:]):
        raise Mixed("multiplies by what belongs to tokens")
    if place is not None and place.dim == _rank(node) - 1:
        raise Mixed("sums over tokens")
    return place


def _over(self: Carrier, node: fx.Node) -> Place | None:
    """Over some dims, which keep their places, or go: norms, cumsum, softmax, topk; sums, ..."""
    given, place = arguments(node), self.of(node.args[0])
    if place is None:
        return None
    rank, sizes = len(self.shape(node.args[0])), given.get("normalized_shape")
    dims = given.get("dim") if sizes is None else range(rank - len(sizes), rank)
    chosen = [dims] if isinstance(dims, int) else list(dims or range(rank))
    chosen = [dim % rank for dim in chosen]
    if place.dim in chosen:
        raise Mixed("goes over all tokens")
    if given.get("keepdim", True):
        return place
    return replace(place, dim=place.dim - sum(dim < place.dim for dim in chosen))


def _lookup(self: Carrier, x: Any, dim: int, index: Any) -> Place | None:
    """Entries of dim `dim` of x by an index, whose dims take the place of that dim."""
    place, where = self.of(x), self.of(index)
    if where is not None:
        if place is not None:
            raise Mixed("looks up tokens by tokens")
        return replace(where, dim=where.dim + dim)
    if place is None or place.dim < dim:
        return place
    if place.dim == dim:
        raise Mixed("looks up other tokens")
    return replace(place, dim=place.dim + len(self.shape(index)) - 1)


def _index(self: Carrier, node: fx.Node) -> Place | None:
    x, indices = node.args[:2]
    given = [(dim, one) for dim, one in enumerate(indices) if one is not None]  # type: ignore[arg-type]
    if len(given) == 1:
        return _lookup(self, x, *given[0])
    if any(self.of(value) is not None for value in (x, *(one for _, one in given))):
        raise Mixed("looks up by several indices")
    return None


def _index_select(self: Carrier, node: fx.Node) -> Place | None:
    given: Any = node.args
    x, dim, index = given[:3]
    return _lookup(self, x, dim % len(self.shape(x)), index)


def _gather(self: Carrier, node: fx.Node) -> Place | None:
    given: Any = node.args
    x, dim, index = given[:3]
    place, where = self.of(x), self.of(index)
    if (place or where) and place != where:
        raise Mixed("looks up tokens by what belongs to none, or the other way round")
    if place is not None and place.dim == dim % _rank(node):
        raise Mixed("looks up other tokens")
    return place


def _reshape(self: Carrier, node: fx.Node) -> Place | None:
    place = self.of(node.args[0])
    if place is None:
        return None
    return reshaped(place, self.axis, self.shape(node.args[0]), self.shape(node))


def _permute(self: Carrier, node: fx.Node) -> Place | None:
    place, order = self.of(node.args[0]), permutation(node)
    return None if place is None or order is None else replace(place, dim=order.index(place.dim))


def _expand(self: Carrier, node: fx.Node) -> Place | None:
    """What is the same for every token may be repeated for each."""
    place, before, after = self.of(node.args[0]), self.shape(node.args[0]), self.shape(node)
    added = len(after) - len(before)
    if place is not None:
        return replace(place, dim=place.dim + added)
    old = (1,) * added + before
    for dim, size in enumerate(after):
        if size == self.axis and old[dim] == 1:
            return Place(dim)
    return None


def _unsqueeze(self: Carrier, node: fx.Node) -> Place | None:
    x, dim, *_ = arguments(node).values()
    place, dim = self.of(x), dim % _rank(node)
    return place if place is None or place.dim < dim else replace(place, dim=place.dim + 1)


def _dropped(self: Carrier, node: fx.Node) -> Place | None:
    """squeeze of one dim, or the choice of one of its entries."""
    place, rank = self.of(node.args[0]), len(self.shape(node.args[0]))
    dim = arguments(node)["dim"] % rank
    if _rank(node) == rank or place is None or place.dim < dim:
        return place
    if place.dim == dim:
        raise Mixed("takes a part of the sequence")
    return replace(place, dim=place.dim - 1)


def _slice(self: Carrier, node: fx.Node) -> Place | None:
    given, place = arguments(node), self.of(node.args[0])
    shape = self.shape(node.args[0])
    if place is None or given["dim"] % len(shape) != place.dim:
        return place
    size = shape[place.dim]
    start = 0 if given["start"] is None else self.number(given["start"])
    end = size if given["end"] is None else self.number(given["end"])
    if given["step"] != 1:
        raise Mixed("takes a part of the sequence")
    return cut(place, self.axis, size, start, end)


def _cat(self: Carrier, node: fx.Node) -> Place | None:
    parts: Any = node.args[0]
    dim = arguments(node)["dim"] % _rank(node)
    places = [place for part in parts if (place := self.of(part)) is not None]
    if not places:
        return None
    if len(places) < len(parts):
        raise Mixed("joins tokens with what belongs to none")
    first = places[0]
    if first.dim != dim:
        if any(place != first for place in places):
            raise Mixed("pairs tokens with tokens")
        return first
    if any((place.dim, place.inner) != (dim, first.inner) for place in places):
        raise Mixed("pairs tokens with tokens")
    return replace(first, outer=sum(place.outer for place in places))


def _collective(self: Carrier, node: fx.Node) -> Place | None:
    """Gathers and scatters split or join dim 0."""
    place = self.of(node.args[0])
    if place is None or place.dim != 0:
        return place
    before, after = self.shape(node.args[0])[0], self.shape(node)[0]
    if node.target is _c10d.all_gather_into_tensor.default:
        return replace(place, outer=place.outer * (after // before))
    ranks = before // after
    if node.target is _c10d.all_to_all_single.default:
        ranks = len(node.args[1])  # type: ignore[arg-type]
    if place.outer % ranks:
        raise Mixed("sends parts of the sequence to other ranks")
    return replace(place, outer=place.outer * after // before)


def _attention(self: Carrier, node: fx.Node) -> Place | None:
    """What the cache is for: query, key and value have the tokens in dim 2; or the query alone."""
    places = [self.of(value) for value in node.args[:3]]
    if places[0] is not None and places[0].alone and places[1:] == [None, None]:
        if places[0].dim == 2:
            return places[0]
    if any(place is None or place != places[0] or not place.alone for place in places):
        raise Mixed("has tokens in another dim than that of its length")
    return places[0]


_SIZED = (aten.reshape.default, aten.expand.default, aten.slice.Tensor)
_RULES: dict[Any, Carries] = {
    **dict.fromkeys(
        POINTWISE, lambda self, node: self.broadcast(node.all_input_nodes, _rank(node))
    ),
    aten.linear.default: _linear,
    **dict.fromkeys((aten.matmul.default, aten.addmm.default), _product),
    **dict.fromkeys(OVER_DIMS, _over),
    operator.getitem: lambda self, node: self.of(node.args[0]),
    aten.embedding.default: lambda self, node: _lookup(self, node.args[0], 0, node.args[1]),
    aten.index.Tensor: _index,
    aten.index_select.default: _index_select,
    aten.gather.default: _gather,
    aten.reshape.default: _reshape,
    **dict.fromkeys((aten.permute.default, aten.transpose.int), _permute),
    aten.expand.default: _expand,
    aten.unsqueeze.default: _unsqueeze,
    **dict.fromkeys((aten.squeeze.dim, aten.select.int), _dropped),
    aten.slice.Tensor: _slice,
    aten.cat.default: _cat,
    **dict.fromkeys(
        (_c10d.all_reduce.default, _c10d.broadcast.default),
        lambda self, node: self.of(node.args[0]),
    ),
    _c10d.all_gather_into_tensor.default: _collective,
    _c10d.reduce_scatter_tensor.default: _collective,
    _c10d.all_to_all_single.default: _collective,
    attention: _attention,
}
