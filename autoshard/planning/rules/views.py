"""Operators that move elements without computing: which dim of the input is which of the result.

A dim map is a function of a OpCall that gives pairs: S(d) of the input becomes S(e) of the result.
`along` makes a rule of a map.

Those that take a fused dim apart ([q | k | v], [gate | up]) do so while it is sharded. A shard of
the fused dim holds rows of one part or of two; one all-to-all of a shard's size gives every rank
its share of each part.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from autoshard.planning.rules.call import OpCall, Rule, differentiable
from autoshard.planning.sizes import Size, count, hint, is_one, same
from autoshard.planning.strategy import ImplCollective, Strategy, value
from autoshard.runtime.collectives import P, S
from autoshard.runtime.operators import Bound, pieces, split_parts, unfold_parts, with_parts


class Pair(NamedTuple):
    """Dim `source` of the input is dim `result` of the output; `even`: only in equal shares."""

    source: int
    result: int
    even: bool = False


DimMap = Callable[[OpCall], Iterable[Pair]]


def along(dim_map: DimMap, *, linear: bool = True) -> Rule:
    """The rule of an operator of one tensor, its first argument: each pair of the map, and P -> P
    where linear."""

    def rule(call: OpCall) -> Iterator[Strategy]:
        operand = call.schema.arguments[0].name  # overloads differ: upsample's are self and input
        (tensor,) = call.given(operand)
        for pair in dim_map(call):
            label = f"{call.op}: dim {pair.source}"
            if call.fits(tensor.shape[pair.source], label, even=pair.even):
                yield call.strategy({operand: S(pair.source)}, S(pair.result))
        if linear and all(differentiable(result) for result in call.results):
            yield call.strategy({operand: P}, P)

    return rule


def _rank(call: OpCall) -> int:
    return int(value(call.operands[0]).dim())


def classes_known(call: OpCall) -> Iterator[Pair]:
    """one_hot: every dim stays, unless the number of classes is the largest value found."""
    if call["num_classes"] == -1:
        call.decline(f"{call.op}: num_classes depends on the data")
        return iter([])
    return (Pair(d, d) for d in range(_rank(call)))


def except_dims(argument: str = "dim") -> DimMap:
    """All dims stay, those that `argument` names do not shard."""

    def dim_map(call: OpCall) -> Iterator[Pair]:
        rank = _rank(call)
        named = call.dims(argument, rank)
        return (Pair(d, d) for d in range(rank) if d not in named)

    return dim_map


def except_last(count: int) -> DimMap:
    """All dims but the last `count` stay."""
    return lambda call: (Pair(d, d) for d in range(_rank(call) - count))


def dropping(call: OpCall) -> Iterator[Pair]:
    """The dim `dim` disappears from the result (select, unbind)."""
    rank = _rank(call)
    (gone,) = call.dims("dim", rank)
    return (Pair(d, d - (d > gone)) for d in range(rank) if d != gone)


def reducing(argument: str | None = "dim") -> DimMap:
    """The named dims are reduced: gone, or of size 1 where keepdim is set."""

    def dim_map(call: OpCall) -> Iterator[Pair]:
        rank = _rank(call)
        gone = set(range(rank)) if argument is None else set(call.dims(argument, rank))
        if call.get("keepdim", False):
            return (Pair(d, d) for d in range(rank) if d not in gone)
        kept = [d for d in range(rank) if d not in gone]
        return (Pair(d, e) for e, d in enumerate(kept))

    return dim_map


def permuted(order: Callable[[OpCall, int], Sequence[int]]) -> DimMap:
    """Result dim e is input dim order(call, rank)[e]."""

    def dim_map(call: OpCall) -> Iterator[Pair]:
        return (Pair(d, e) for e, d in enumerate(order(call, _rank(call))))

    return dim_map


def swapped(first: Any, second: Any) -> Callable[[OpCall, int], list[int]]:
    """An order with two dims exchanged; each an int or the name of an argument."""

    def order(call: OpCall, rank: int) -> list[int]:
        dims = list(range(rank))
        if rank == 0:
            return dims
        a = (call[first] if isinstance(first, str) else first) % rank
        b = (call[second] if isinstance(second, str) else second) % rank
        dims[a], dims[b] = dims[b], dims[a]
        return dims

    return order


def by_movedim(call: OpCall, rank: int) -> list[int]:
    """The order of movedim, from one dim or several."""
    moved, to = call.dims("source", rank), call.dims("destination", rank)
    rest = iter([d for d in range(rank) if d not in moved])
    return [moved[to.index(e)] if e in to else next(rest) for e in range(rank)]


def reshaped(call: OpCall) -> Iterator[Pair]:
    """reshape, view, flatten, unflatten, squeeze, unsqueeze: the arithmetic of the two sizes.

    Dims are grouped so that each group of the input holds the elements of one group of the
    result. The outermost dim of a group passes where both its sides divide: in row-major order
    rank r then holds the same elements on both sides. A dim that is a group by itself on both
    sides passes in uneven shares too.
    """
    before, after = value(call.operands[0]).shape, call.result.shape
    for sources, results in _groups(before, after):
        if len(sources) == len(results) == 1:
            yield Pair(sources[0], results[0])
        elif call.fits(after[results[0]], f"{call.op}: result dim {results[0]}", even=True):
            yield Pair(sources[0], results[0], even=True)


def squeezed(call: OpCall) -> Iterator[Pair]:
    """squeeze: as reshaped, unless a shard of one row would be squeezed away."""
    shape = value(call.operands[0]).shape
    named = call.dims("dim", len(shape)) if "dim" in call else range(len(shape))
    for pair in reshaped(call):
        rows = hint(shape[pair.source]) or 0
        if pair.source in named and rows < 2 * call.n:
            call.decline(f"{call.op}: a shard of dim {pair.source} would have one row")
        else:
            yield pair._replace(even=pair.even or pair.source in named)


def _groups(before: Sequence[Size], after: Sequence[Size]) -> Iterator[tuple[list[int], list[int]]]:
    left = [d for d, size in enumerate(before) if not is_one(size)]
    right = [d for d, size in enumerate(after) if not is_one(size)]
    if any(not hint(size) for size in [*before, *after]):
        return  # an empty tensor, or a size only known at run time
    while left and right:
        sources, results = [left.pop(0)], [right.pop(0)]
        while not same(math.prod(before[d] for d in sources), math.prod(after[d] for d in results)):
            have = math.prod(hint(before[d]) or 0 for d in sources)
            want = math.prod(hint(after[d]) or 0 for d in results)
            if left and (have <= want or not right):
                sources.append(left.pop(0))
            elif right:
                results.append(right.pop(0))
            else:
                break
        yield sources, results


def diagonalised(call: OpCall) -> Iterator[Pair]:
    """diagonal: the two dims become the last one of the result."""
    rank = _rank(call)
    gone = {call["dim1"] % rank, call["dim2"] % rank}
    return (Pair(d, e) for e, d in enumerate(d for d in range(rank) if d not in gone))


def expanded(call: OpCall) -> Iterator[Strategy]:
    """expand: kept dims pass; a dim that is new or grows may be made at its local size."""
    (tensor,), result = call.given("self"), call.result
    shift = result.dim() - tensor.dim()
    for e, size in enumerate(result.shape):
        d = e - shift
        label = f"{call.op}: dim {e}"
        if d >= 0 and same(tensor.shape[d], size):
            if call.fits(size, label):
                yield call.strategy({"self": S(d)}, S(e))
        elif call.fits(size, label):
            yield call.strategy({}, S(e))
    if differentiable(result):
        yield call.strategy({"self": P}, P)


def sliced(call: OpCall) -> Iterator[Pair]:
    """slice: the other dims, and the sliced one where the slice is the whole of it."""
    rank = _rank(call)
    (dim,) = call.dims("dim", rank)
    size = value(call.operands[0]).shape[dim]
    whole = same(call.result.shape[dim], size) and call.get("step", 1) == 1
    return (Pair(d, d) for d in range(rank) if d != dim or whole)


def repeated_once(call: OpCall) -> Iterator[Pair]:
    """repeat, tile: the dims repeated once."""
    rank = _rank(call)
    times = list(call.get("repeats") or call.get("dims"))
    times = [1] * (rank - len(times)) + times
    shift = len(times) - rank
    return (Pair(d, d + shift) for d in range(rank) if times[d + shift] == 1)


def repeated(call: OpCall) -> Iterator[Strategy]:
    """repeat: the dims repeated once; one that is new, or of one entry, is made at its local
    size."""
    yield from along(repeated_once)(call)
    for e, (times, size) in enumerate(zip(call["repeats"], call.result.shape)):
        if same(times, size) and call.fits(size, f"{call.op}: dim {e}"):
            yield call.strategy({}, S(e))


def repeat_interleaved(call: OpCall) -> Iterator[Pair]:
    """repeat_interleave by a number: every dim, the repeated one in equal shares."""
    rank = _rank(call)
    if call["dim"] is None:
        return iter([Pair(0, 0, even=True)] if rank == 1 else [])
    (dim,) = call.dims("dim", rank)
    return (Pair(d, d, even=d == dim) for d in range(rank))


def unpadded(call: OpCall) -> Iterator[Pair]:
    """pad: the dims that get no padding."""
    rank = _rank(call)
    padding = call["pad"]
    padded = {rank - 1 - i // 2 for i, amount in enumerate(padding) if amount != 0}
    if call.get("mode", "constant") != "constant":
        padded |= {rank - 1 - i // 2 for i in range(len(padding))}
    return (Pair(d, d) for d in range(rank) if d not in padded)


def padding(call: OpCall) -> Iterable[Strategy]:
    """pad: linear unless it pads with a number other than zero."""
    linear = call.get("mode", "constant") != "constant" or call["value"] in (None, 0)
    return along(unpadded, linear=linear)(call)


def joined(call: OpCall) -> Iterator[Strategy]:
    """cat: every dim but the one along which the tensors are joined; stack: every dim, moved by the
    new one. Partial if all are."""
    tensors, result = call.tensors("tensors"), call.result
    (dim,) = call.dims("dim", result.dim())
    ranks, stacks = {tensor.dim() for tensor in tensors}, call.op.startswith("aten.stack")
    if stacks or ranks == {result.dim()}:  # a legacy empty tensor has another rank
        for d in call.split_dims(tensors[0].shape, *(() if stacks else (dim,))):
            made = S(d + (stacks and d >= dim))
            yield call.strategy({"tensors": [S(d)] * len(tensors)}, made)
    if all(differentiable(tensor) for tensor in tensors):
        yield call.strategy({"tensors": [P] * len(tensors)}, P)


_SIZES = (
    "reshape view _unsafe_view expand view_copy expand_copy reshape_copy _reshape_alias new_zeros "
    "new_ones new_full"
)
_OF_SIZES = {f"aten.{name}" for name in _SIZES.split()}
"""Operators whose second argument is the shape of the result."""


def size_entry(node: fx.Node, dim: int) -> tuple[int, int] | None:
    """The argument, and the entry of its list, that hold the size of dim `dim` of the result.

    The rewrite makes that entry local; an entry of -1 stays. None where no argument says it.
    """
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return None
    name = str(target.overloadpacket)
    if name in _OF_SIZES and target._overloadname != "dtype":
        return 1, dim
    if name == "aten.repeat":  # the times of a dim that has one entry are its size
        times: Any = node.args[1]
        return (1, dim) if same(times[dim], value(node).shape[dim]) else None
    if name == "aten.unflatten":
        first = node.args[1] % value(node.all_input_nodes[0]).dim()
        if first <= dim < first + len(node.args[2]):  # type: ignore[arg-type]
            return 2, dim - first
    return None


MOST_PIECES = 64  # blocks a rank cuts its shard into, at most


def split(call: OpCall) -> Iterator[Strategy]:
    """split, chunk and glu along the sharded dim, where every part divides."""
    (tensor,) = call.given("self")
    (dim,) = call.dims("dim", tensor.dim())
    if isinstance(call.result, torch.Tensor):  # glu
        sizes = (call.result.shape[dim],) * 2
        impl = Bound.of(with_parts, op=call.target, sharded_dim=dim, sizes=sizes)
    else:
        sizes = tuple(part.shape[dim] for part in call.result)
        impl = Bound.of(split_parts, sharded_dim=dim, sizes=sizes)
    if traffic := _traffic(call, tensor, dim, sizes):
        yield call.strategy({"self": S(dim)}, S(dim), impl, traffic)


def unfolded(call: OpCall) -> Iterator[Strategy]:
    """A view [.., 3 * h, ..] -> [.., 3, h, ..]: sharded on h, where 3 does not divide."""
    before, after = value(call.operands[0]).shape, call.result.shape
    extra = len(after) - len(before)
    if extra < 1:
        return
    dim = 0
    while dim < len(before) and same(before[dim], after[dim]):
        dim += 1
    tail = len(before) - dim - 1
    if dim == len(before) or not all(map(same, before[dim + 1 :], after[len(after) - tail :])):
        return
    shape = after[dim : len(after) - tail]
    if not all(isinstance(size, int) for size in shape) or is_one(shape[0]):
        return
    if shape[0] % call.n == 0 or not call.fits(shape[1], f"{call.op}: dim {dim + 1}", even=True):
        return
    tensor = value(call.operands[0])
    traffic = _traffic(call, tensor, dim, [before[dim] // shape[0]] * shape[0])
    if traffic:
        impl = Bound.of(unfold_parts, sharded_dim=dim, shape=tuple(shape))
        yield call.strategy({"self": S(dim)}, S(dim + 1), impl, traffic)


def _traffic(
    call: OpCall, tensor: torch.Tensor, dim: int, sizes: Sequence[int | torch.SymInt]
) -> list[ImplCollective]:
    """The all-to-alls of taking the dim apart; none where it cannot be done (call keeps why)."""
    label = f"{call.op}: a part of dim {dim}"
    known = [size for size in sizes if isinstance(size, int)]
    if len(known) < len(sizes) or len(sizes) < 2:
        return []
    if not all([call.fits(size, label, even=True) for size in known]):
        return []
    if pieces(known, call.n) > MOST_PIECES:
        call.decline(f"{label}: its rows would move in more than {MOST_PIECES} pieces")
        return []
    others = count(size for d, size in enumerate(tensor.shape) if d != dim)
    nbytes = sum(known) // call.n * others * tensor.element_size()
    forward = ImplCollective("all_to_all", nbytes)
    return [forward, forward._replace(backward=True)] if differentiable(tensor) else [forward]
