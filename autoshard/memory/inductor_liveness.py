"""Which values of a graph Inductor stores, when it makes them, and in whose memory.

A pointwise operator becomes a part of the loops that read it, and has no memory of its own, unless
something needs its value as a tensor. The rules are those of Inductor's lowering
(`torch/_inductor/graph.py`, `GraphLowering.run_node`, and `StorageBox.should_realize_on_reuse` in
ir.py), in the order of the graph:

- products, collectives, attention and whatever is no loop store their results and read stored ones;
- so do reductions, of more than eight elements each;
- a value is stored when several operators read it and it costs much to compute again: exp, log,
  sigmoid or tanh in it, more than four tensors to read, or more than thirty operators; for one
  reader from nine tensors on;
- the pieces of a concatenation are computed into it, and an all-reduce writes to a value of which
  it is the last reader;
- a loop writes its result over an operand of the same size that nobody reads afterwards.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autoshard.memory.liveness import Held, Kernel, Storage, alias_of, read_by
from autoshard.passes import WAIT
from autoshard.planning import tensor_bytes

aten, prims = torch.ops.aten, torch.ops.prims

_READS, _READS_ONCE, _OPERATORS, _UNROLLED = 4, 8, 30, 8


def _overloads(*names: str) -> frozenset[Any]:
    packets = [getattr(aten, name, None) for name in names]
    return frozenset(packet for packet in packets if packet is not None)


_HEAVY = _overloads("exp", "log", "log10", "log1p", "log2", "sigmoid", "tanh")
_REDUCTIONS = _overloads(
    "sum", "mean", "amax", "amin", "var_mean", "var", "prod", "any", "all", "argmax", "argmin",
    "max", "min", "logsumexp",
)  # fmt: skip
_LOOPS = _overloads(
    "index", "embedding", "gather", "clone", "_to_copy", "full", "full_like", "arange", "where",
    "constant_pad_nd", "zeros_like", "ones_like", "scalar_tensor", "copy", "slice_scatter",
    "select_scatter", "triu", "tril", "flip", "repeat", "empty",
) | {prims.convert_element_type, prims.iota}  # fmt: skip
# what writes to memory it is given; others allocate their results themselves
_PRODUCTS = _overloads("mm", "addmm", "bmm", "baddbmm")
# loops that write to some elements of their first operand, or of a copy of it
_SCATTERS = _overloads(
    "index_put", "_unsafe_index_put", "_unsafe_masked_index_put_accumulate", "scatter",
    "scatter_add", "scatter_reduce", "index_add", "index_copy",
)  # fmt: skip
_VIEWS = _overloads("reshape", "_unsafe_view", "contiguous", "flatten", "expand")


@dataclass(eq=False)
class _Value:
    """A tensor: stored in `storages`, or to be computed from `sources` where it is read.

    pending: not stored, so far. operators: those that would be computed. into: the concatenation
    it is computed into.
    """

    node: fx.Node
    nbytes: int
    storages: tuple[Storage, ...] = ()
    pending: bool = False
    sources: dict[_Value, None] = field(default_factory=dict)
    operators: dict[fx.Node, None] = field(default_factory=dict)
    into: Storage | None = None


class Fused:
    """The steps of a graph and the storages of its values, as Inductor makes them.

    kernels: every loop nest and every other operator that runs, in order. held: the storages of
    each node's value, of one that is never stored those it is computed from.
    """

    def __init__(self, graph: fx.Graph, given: Held, kind: str) -> None:
        self.kind = kind
        self.kernels: list[Kernel] = []
        self._values: dict[fx.Node, list[_Value]] = {}
        outputs = {n for n in next(iter(reversed(graph.nodes))).all_input_nodes}
        self._wanted = _wanted(graph)
        for node in graph.nodes:
            if node.op == "call_function":
                self._lower(node)
                if node in outputs:
                    self._store(self._all(node))
            elif node.op == "output":
                self.kernels.append(Kernel(node, self._memory(node.all_input_nodes), ()))
            else:
                self._values[node] = [_Value(node, 0, given.get(node, ()))]
        self.kernels = _calls(_fused(self.kernels))
        self.held = {
            node: tuple(dict.fromkeys(s for v in values for s in _stored(v)))
            for node, values in self._values.items()
        }

    def _lower(self, node: fx.Node) -> None:
        packet = getattr(node.target, "overloadpacket", None)
        source = alias_of(node)
        if packet in _VIEWS or packet is aten.detach:
            source = node.args[0]  # type: ignore[assignment]
        if node.target is operator.getitem:
            values = self._values[node.args[0]]  # type: ignore[index]
            several = len(values) > 1
            self._values[node] = [values[node.args[1]]] if several else values  # type: ignore[index]
        elif node.target is WAIT:
            self._values[node] = self._values[source]  # type: ignore[index]
            self._run(node, (), waits=True)
        elif isinstance(source, fx.Node) and source in self._values:
            self._values[node] = self._values[source]
            if _writes(node):
                self._store(self._operands(node))
                self._run(node, _stored(self._values[source][0]))
        elif packet is aten.cat:
            self._concatenate(node)
        elif _is_loop(node):
            self._loop(node)
        elif packet in _SCATTERS:
            self._store(self._all(node.all_input_nodes[0]))
            storage = Storage(tensor_bytes(node.meta["val"]), self.kind)
            self._values[node] = [_Value(node, storage.nbytes, (storage,))]
            reads = self._memory(node.all_input_nodes)
            self.kernels.append(Kernel(node, reads, (storage,), _loop(node), True))
        else:
            self._store(self._operands(node))
            made = [
                _Value(node, tensor_bytes(leaf), (Storage(tensor_bytes(leaf), self.kind),))
                for leaf in pytree.tree_leaves(node.meta.get("val"))
            ]
            self._values[node] = made
            self._run(node, [s for v in made for s in v.storages])

    def _loop(self, node: fx.Node) -> None:
        sources: dict[_Value, None] = {}
        operators = {node: None}
        for value in self._operands(node):
            sources.update(value.sources if value.pending else {value: None})
            operators.update(value.operators)
        leaves = pytree.tree_leaves(node.meta.get("val"))
        made = [_Value(node, tensor_bytes(leaf), (), True, sources, operators) for leaf in leaves]
        self._values[node] = made
        piece = self._wanted.get(node)
        if piece is not None:
            piece.kind = self.kind
            made[0].into = piece
        heavy = any(getattr(n.target, "overloadpacket", None) in _HEAVY for n in operators)
        costly = heavy or len(sources) > _READS or len(operators) > _OPERATORS
        if piece is not None or _reduces(node):
            self._store(made)
        elif (len(node.users) > 1 and costly) or len(sources) > _READS_ONCE:
            self._store(made)

    def _concatenate(self, node: fx.Node) -> None:
        whole = next(
            (v.into for p in node.all_input_nodes for v in self._all(p) if v.into is not None), None
        )
        storage = whole or Storage(tensor_bytes(node.meta["val"]), self.kind)
        reads = self._memory(node.all_input_nodes)
        self._values[node] = [_Value(node, storage.nbytes, (storage,))]
        self.kernels.append(Kernel(node, reads, (storage,), _loop(node), True))

    def _store(self, values: Iterable[_Value]) -> None:
        """Have the values in memory from here on."""
        for value in values:
            if not value.pending:
                continue
            value.pending = False
            reads = tuple(dict.fromkeys(s for v in value.sources for s in v.storages))
            made = value.into or Storage(value.nbytes, self.kind)
            value.storages = (made,)
            self.kernels.append(Kernel(value.node, reads, (made,), _loop(value.node), True))

    def _run(self, node: fx.Node, writes: Iterable[Storage], waits: bool = False) -> None:
        reads = self._memory(read_by(node) if waits else node.all_input_nodes)
        planned = getattr(node.target, "overloadpacket", None) in _PRODUCTS
        self.kernels.append(Kernel(node, reads, tuple(writes), planned=planned))

    def _memory(self, nodes: Iterable[fx.Node]) -> tuple[Storage, ...]:
        found = [s for n in nodes for v in self._all(n) for s in _stored(v)]
        return tuple(dict.fromkeys(found))

    def _operands(self, node: fx.Node) -> list[_Value]:
        return [value for n in node.all_input_nodes for value in self._all(n)]

    def _all(self, node: fx.Node) -> list[_Value]:
        return self._values.get(node, [])


def _stored(value: _Value) -> tuple[Storage, ...]:
    """Where the value is, or what it is computed from."""
    if not value.pending:
        return value.storages
    return tuple(dict.fromkeys(s for source in value.sources for s in source.storages))


def _writes(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def _is_loop(node: fx.Node) -> bool:
    packet = getattr(node.target, "overloadpacket", None)
    if packet in _LOOPS or node.target in _LOOPS or packet in _REDUCTIONS:
        return True
    tags = getattr(node.target, "tags", ())
    return torch.Tag.pointwise in tags


def _reduces(node: fx.Node) -> bool:
    if getattr(node.target, "overloadpacket", None) not in _REDUCTIONS:
        return False
    made = pytree.tree_leaves(node.meta["val"])[0]
    source: Any = node.args[0]
    read = source.meta["val"]
    return bool(_numel(read) > _UNROLLED * _numel(made))


def _numel(tensor: torch.Tensor) -> int:
    return tensor_bytes(tensor) // tensor.element_size()


def _wanted(graph: fx.Graph) -> dict[fx.Node, Storage]:
    """The concatenation that a loop is computed into."""
    found: dict[fx.Node, Storage] = {}
    for node in graph.nodes:
        if getattr(node.target, "overloadpacket", None) is not aten.cat:
            continue
        whole: Storage | None = None
        for piece in node.all_input_nodes:
            if piece.op == "call_function" and len(piece.users) == 1 and _is_loop(piece):
                whole = whole or Storage(tensor_bytes(node.meta["val"]), "")
                found[piece] = whole
    return found


def _loop(node: fx.Node) -> tuple[int, int]:
    """`Kernel.loop` of an operator."""
    leaves = pytree.tree_leaves(node.meta["val"])
    made = max(_numel(leaf) for leaf in leaves)
    if not _reduces(node):
        return made, 0
    source: Any = node.args[0]
    read = source.meta["val"]
    dims = node.args[1] if len(node.args) > 1 else None
    dims = [dims] if isinstance(dims, int) else dims
    last = not dims or {d % read.dim() for d in dims} == set(range(read.dim())[-len(dims) :])  # type: ignore
    return _numel(read), made if last else -made


def _join(one: tuple[int, int], other: tuple[int, int]) -> bool:
    """Whether two loops can be one: over the same elements in the same order."""
    same = one[1] == other[1] or (0 in (one[1], other[1]) and min(one[1], other[1]) >= 0)
    return one[0] == other[0] and same


def _fused(kernels: Sequence[Kernel]) -> list[Kernel]:
    """Loops over the same elements that read the same, or one what the other makes, as one loop, at
    the place of the first. What only the loop itself reads is not stored."""
    groups: list[list[Kernel]] = []
    made: dict[Storage, int] = {}  # the group that makes it
    for kernel in kernels:
        ready = max((made.get(s, 0) for s in kernel.reads), default=0)
        at = len(groups)
        if kernel.loop[0]:
            near = range(len(groups) - 1, ready - 1, -1)
            at = next((i for i in near if _shares(groups[i], kernel)), at)
        if at == len(groups):
            groups.append([])
        groups[at].append(kernel)
        for storage in kernel.writes:
            made[storage] = max(made.get(storage, 0), at)
    readers: dict[Storage, set[int]] = {}
    for i, group in enumerate(groups):
        for storage in (s for kernel in group for s in kernel.reads):
            readers.setdefault(storage, set()).add(i)
    found = []
    for i, group in enumerate(groups):
        inside = {s for k in group for s in k.writes if readers.get(s) == {i}}
        inside = inside if len(group) > 1 else set()
        reads = dict.fromkeys(s for k in group for s in k.reads if s not in inside)
        writes = dict.fromkeys(s for k in group for s in k.writes if s not in inside)
        loop = max(kernel.loop for kernel in group)
        parts = tuple((kernel.reads, kernel.writes) for kernel in group)
        found.append(replace(group[-1], reads=(*reads,), writes=(*writes,), loop=loop, parts=parts))
    return found


def _shares(group: Sequence[Kernel], kernel: Kernel) -> bool:
    """Whether a loop becomes one with those before it, which it follows element by element, or
    result by result of their reduction."""
    read = set(kernel.reads)
    follows = [one for one in group if not read.isdisjoint(one.writes)]
    if not _in_rows(kernel.node) and any(abs(one.loop[1]) == kernel.loop[0] for one in follows):
        return True
    near = follows or [one for one in group if not read.isdisjoint(one.reads)]
    return bool(near) and all(_join(one.loop, kernel.loop) for one in group)


def _in_rows(node: fx.Node) -> bool:
    """Whether a value is computed into the rows of a concatenation: a loop over two dims."""
    for user in node.users:
        if user.target is aten.cat.default:
            dim = user.args[1] if len(user.args) > 1 else 0
            shape = user.meta["val"].shape
            if any(size != 1 for size in shape[: dim % len(shape)]):  # type: ignore[operator]
                return True
    return False


def _calls(kernels: Sequence[Kernel]) -> list[Kernel]:
    """Loops with nothing else between them are one function of C++."""
    found: list[Kernel] = []
    for kernel in kernels:
        joined = bool(kernel.loop[0] and found and found[-1].loop[0])
        found.append(replace(kernel, joined=joined))
    return found
