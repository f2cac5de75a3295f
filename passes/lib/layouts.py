"""A library for passes: where a value's elements lie, after views and in the memory of the trace.

After autograd: what became of a value's dims in its views. The dims of one value are numbered; each
is an atom, and a layout says of another value which atoms each of its dims is made of, the slowest
first. Views and permutations rearrange atoms: what they do to a value of many rows is so known
without a rule for each spelling of it.

Before it: operators that read memory by strides, in graphs whose values are gathered. The strides
of a captured graph are those of the serial model. A rank's value is laid out as its own operators
leave it, and a gathered or a stored one as rows, so that `as_strided` with the strides of the trace
would find other elements. `arrange` gives it memory as it was in the trace, before anything else is
rewritten; `as_traced` does so for the operand of one rank.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._ops import OpOverload

from autoshard.errors import PlanError
from autoshard.passes.base import Report, maker, replace, user_line
from autoshard.planning import packet
from autoshard.runtime.compat import viewed
from autoshard.runtime.graph_meta import DIFF

aten = torch.ops.aten


class Atom(NamedTuple):
    """A dim of the value that is followed, or (-1) the ranks of its axis."""

    number: int
    size: int


Arrangement = tuple[tuple[Atom, ...], ...]
"""Of each dim its atoms; those of size 1 are left out."""

RANKS = -1

_REGROUPS = frozenset(
    getattr(aten, name)
    for name in ("view", "reshape", "_unsafe_view", "unsqueeze", "squeeze", "flatten", "unflatten")
)
_PERMUTES = frozenset({aten.permute, aten.transpose, aten.t})
_SAME = frozenset({aten.clone, aten.alias, aten.detach, aten.contiguous})


def gathered_layout(shard: Sequence[int], n: int) -> Arrangement:
    """Of what `n` ranks' shards are gathered to by an all-gather, or of what is reduce-scattered to
    them: blocks of whole shards along the first dim."""
    atoms = [Atom(i, size) for i, size in enumerate(shard)]
    layout = ((Atom(RANKS, n), atoms[0]), *((atom,) for atom in atoms[1:]))
    return tuple(tuple(atom for atom in dims if atom.size != 1) for dims in layout)


def below(node: fx.Node, layout: Arrangement) -> Arrangement | None:
    """The layout of a view of a value; None: it is none, or cuts an atom."""
    order = permutation(node)
    if order is None:
        return _unturned(node, layout, node.meta["val"].shape)
    return tuple(layout[dim] for dim in order)


def above(node: fx.Node, layout: Arrangement) -> Arrangement | None:
    """The layout of what `node` is a view of, from its own."""
    order = permutation(node)
    if order is None:
        return _unturned(node, layout, node.args[0].meta["val"].shape)  # type: ignore[union-attr]
    return tuple(layout[order.index(dim)] for dim in range(len(order)))


def _unturned(node: fx.Node, layout: Arrangement, shape: Sequence[int]) -> Arrangement | None:
    """The layout on the other side of an operator that keeps the order of elements."""
    kind = packet(node)
    return layout if kind in _SAME else _regrouped(layout, shape) if kind in _REGROUPS else None


def split_dim(layout: Arrangement, shard: Sequence[int]) -> int | None:
    """The dim along which shards are laid side by side in a matrix of all rows; None: it is none.

    A matrix of rows has the last dim of the value as its columns, and every other, in order, as its
    rows.
    """
    last = len(shard) - 1
    if len(layout) != 2 or [atom.number for atom in layout[1]] not in ([last], []):
        return None
    if not layout[1] and shard[last] != 1:
        return None
    numbers = [atom.number for atom in layout[0]]
    ranks = numbers.index(RANKS) if RANKS in numbers else None
    others = [i for i in range(last) if shard[i] != 1]
    if ranks is None or [number for number in numbers if number != RANKS] != others:
        return None
    if ranks + 1 < len(numbers):
        return numbers[ranks + 1]
    return last - 1 if last and shard[last - 1] == 1 else None


def in_order(layout: Arrangement, shard: Sequence[int], dim: int) -> bool:
    """Whether a value has its elements in the order of the one gathered along `dim`."""
    wanted = [i for i in range(len(shard)) if shard[i] != 1 or i == dim]
    place = wanted.index(dim)
    numbers = [i for i in [*wanted[:place], RANKS, *wanted[place:]] if i < 0 or shard[i] != 1]
    return [atom.number for dims in layout for atom in dims] == numbers


def is_rearranged(node: fx.Node) -> bool:
    """Whether a node is a view, a permutation or a copy of its operand."""
    return packet(node) in _SAME | _REGROUPS | _PERMUTES


def _regrouped(layout: Arrangement, shape: Sequence[int]) -> Arrangement | None:
    if not all(isinstance(size, int) for size in shape):
        return None
    atoms = [atom for dims in layout for atom in dims]
    found: list[tuple[Atom, ...]] = []
    for size in shape:
        group: list[Atom] = []
        held = 1
        while held < size and atoms:
            group.append(atoms.pop(0))
            held *= group[-1].size
        if held != size:
            return None
        found.append(tuple(group))
    return tuple(found) if not atoms else None


def permutation(node: fx.Node) -> list[int] | None:
    """The dims of its operand, as a permutation has them; None: it is none."""
    kind, args = packet(node), node.args[1:]
    if kind not in (aten.permute, aten.transpose, aten.t, aten.numpy_T):
        return None
    order = list(range(node.meta["val"].dim()))
    if kind is aten.permute:
        given: Any = args[0]
        return [dim % len(order) for dim in given]
    if kind is aten.transpose or len(order) == 2:
        a, b = args if args else (0, 1)
        order[a], order[b] = order[b], order[a]  # type: ignore[index]
        return order
    return order[::-1] if kind is aten.numpy_T else None


_READS = (aten.as_strided.default, aten.as_strided_copy.default)
_WRITE = aten.as_strided_scatter.default
_BY_STRIDES = frozenset([*_READS, _WRITE, aten.view_as_complex.default, aten.view.dtype])
# Operators of these ask every operand for its strides.
_KNOWN = ("aten", "autoshard")


class _Pattern(NamedTuple):
    """Places in memory: those of a tensor of this size, with these strides, from there."""

    size: Sequence[Any]
    stride: Sequence[Any]
    start: Any

    def within(self, elements: Any) -> bool:
        """Whether all of them are in the first `elements`; a size that is counted when the graph
        runs is trusted."""
        numbers = [*self.size, *self.stride, self.start, elements]
        if not all(isinstance(n, int) for n in numbers) or 0 in self.size:
            return True
        last = sum((size - 1) * stride for size, stride in zip(self.size, self.stride))
        return bool(0 <= self.start and self.start + last < elements)


def reads_strides(node: fx.Node) -> bool:
    """Whether the node's value, or whether it may run, depends on the strides of its operands."""
    if node.op != "call_function" or not node.all_input_nodes:
        return False
    if node.target in _BY_STRIDES or isinstance(node.target, torch._ops.HigherOrderOperator):
        return True
    return isinstance(node.target, OpOverload) and node.target.namespace not in _KNOWN


def memory_order(val: torch.Tensor) -> list[int] | None:
    """The dims from the slowest in memory to the fastest; None where the memory has gaps, or where
    elements share it."""
    dims = range(val.dim())
    order = sorted(dims, key=lambda dim: (val.stride(dim), val.shape[dim]), reverse=True)
    expected = 1
    for dim in reversed(order):
        if val.shape[dim] != 1 and val.stride(dim) != expected:
            return None
        expected *= val.shape[dim]
    return order


def as_traced(node: fx.Node, traced: torch.Tensor, make: Callable[..., fx.Node]) -> fx.Node:
    """A rank's operand in the order of memory that it was traced in: a copy where it is in another.

    make: emits an operator with its arguments.
    """
    order = memory_order(traced)
    if order is None:
        return node
    if order == sorted(order):
        return make(aten.contiguous.default, node)
    rows = make(aten.contiguous.default, make(aten.permute.default, node, order))
    return make(aten.permute.default, rows, [order.index(dim) for dim in range(len(order))])


def arrange(graph: fx.Graph, ranks: int, report: Report, name: str) -> None:
    """Give what reads or writes by strides memory arranged as its strides assume.

    name: the pass that asks. Raises PlanError for memory that no value of the graph has.
    """
    for node in list(graph.nodes):
        if node.target in _READS or node.target is _WRITE:
            with graph.inserting_before(node):
                report.hits += _Arranging(node, name).run(ranks)


class _Arranging:
    """The rewriting of one operator. make: a node before the one that is rewritten."""

    def __init__(self, node: fx.Node, name: str) -> None:
        self.node, self.make = node, maker(node, name)

    def run(self, ranks: int) -> bool:
        """Whether the node was rewritten."""
        node, writes = self.node, self.node.target is _WRITE
        source, *rest = [*node.args, *node.kwargs.values()]
        part = rest.pop(0) if writes else None
        assert isinstance(source, fx.Node)
        if not writes:
            source = self.unexpanded(source)
        size, stride, start = [*rest, None][:3]
        start = source.meta["val"].storage_offset() if start is None else start
        wanted = _Pattern(size, stride, start)  # type: ignore[arg-type]
        base = self.base(source, wanted, views=not writes)
        if base is None:
            if ranks == 1 and source.op == "placeholder" and not source.meta.get(DIFF):
                return False  # nobody stores it otherwise
            raise self.refused(source)
        here = _from(base, wanted)
        memory = self.rows(base if base is source else self.detached(base))
        if base is not source and source.meta.get(DIFF):  # what is behind a view has no gradient
            memory = self.written(memory, _from(base, self.own(source)), source)
        if writes:
            new = self.turned_back(self.written(memory, here, part), base)
        else:
            new = self.make(aten.as_strided.default, memory, *here)
        replace(node, new)
        return True

    def base(self, source: fx.Node, pattern: _Pattern, views: bool) -> fx.Node | None:
        """The value whose memory, without gaps, has the pattern: the source or what it views."""
        at: fx.Node | None = source
        while at is not None:
            val = at.meta["val"]
            if isinstance(val, torch.Tensor) and memory_order(val) is not None:
                if _from(at, pattern).within(val.numel()):
                    return at
            at = viewed(at) if views else None
        return None

    def own(self, source: fx.Node) -> _Pattern:
        """The places of a view's elements, no two of them the same."""
        val = source.meta["val"]
        numbers = [*val.shape, *val.stride(), val.storage_offset()]
        reach = 0
        for stride, size in sorted(zip(val.stride(), val.shape)):
            if size != 1 and stride <= reach or not all(isinstance(n, int) for n in numbers):
                raise self.refused(source)
            reach += (size - 1) * stride
        return _Pattern(list(val.shape), list(val.stride()), val.storage_offset())

    def detached(self, base: fx.Node) -> fx.Node:
        """The value without its gradient."""
        made = self.make(aten.detach.default, base)
        made.meta[DIFF] = False
        return made

    def unexpanded(self, source: fx.Node) -> fx.Node:
        """A value without its expanded dims, whose elements are one in memory."""
        val = source.meta["val"]
        for dim in range(val.dim()):
            if val.shape[dim] != 1 and val.stride(dim) == 0:
                source = self.make(aten.slice.Tensor, source, dim, 0, 1)
        return source

    def rows(self, base: fx.Node) -> fx.Node:
        """The value with its dims in the order of memory, in memory of its own."""
        turned = self.make(aten.permute.default, base, memory_order(base.meta["val"]))
        return self.make(aten.clone.default, turned, memory_format=torch.contiguous_format)

    def turned_back(self, rows: fx.Node, base: fx.Node) -> fx.Node:
        """`rows` with its dims where `base` has them."""
        order = memory_order(base.meta["val"])
        assert order is not None
        return self.make(aten.permute.default, rows, [order.index(d) for d in range(len(order))])

    def written(self, rows: fx.Node, pattern: _Pattern, part: Any) -> fx.Node:
        """The memory with a part written to it: by index, since torch's gradient of
        as_strided_scatter is that of what was overwritten."""
        flat = self.make(aten.reshape.default, rows, [-1])
        ones = self.make(aten.ones_like.default, flat, dtype=torch.int64)
        places = self.make(aten.sub.Tensor, self.make(aten.cumsum.default, ones, 0), 1)
        index = self.make(aten.as_strided.default, places, *pattern)
        index, part = (self.make(aten.reshape.default, one, [-1]) for one in (index, part))
        made = self.make(aten.scatter.src, flat, 0, index, part)
        return self.make(aten.view_as.default, made, rows)

    def refused(self, source: fx.Node) -> PlanError:
        """Says of what."""
        op = str(self.node.target).removeprefix("aten.").split(".")[0]
        val = source.meta["val"]
        return PlanError(
            f"{op} reads memory behind a view with gaps (shape {tuple(val.shape)}, strides "
            f"{tuple(val.stride())}), which its shards lack",
            where=user_line(self.node),
            remedy="Use unfold or indices, or call as_strided on x.contiguous().",
        )


def _from(base: fx.Node, pattern: _Pattern) -> _Pattern:
    """The pattern, counted from where the memory of `base` starts."""
    behind = base.meta["val"].storage_offset()
    return pattern._replace(start=pattern.start - behind) if behind else pattern
