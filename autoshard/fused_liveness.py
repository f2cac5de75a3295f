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
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autoshard.liveness import Held, Kernel, Storage, alias_of, read_by
from autoshard.planning.values import tensor_bytes

aten, prims = torch.ops.aten, torch.ops.prims
_c10d = torch.ops._c10d_functional

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
# loops that write to some elements of their first operand, or of a copy of it
_SCATTERS = _overloads(
    "index_put", "_unsafe_index_put", "_unsafe_masked_index_put_accumulate", "scatter",
    "scatter_add", "scatter_reduce", "index_add", "index_copy",
)  # fmt: skip
_VIEWS = _overloads("reshape", "_unsafe_view", "contiguous", "flatten", "expand")


@dataclass(eq=False)
class _Value:
    """A tensor: stored in `storages`, or to be computed from `sources` where it is read.

    pending: not stored, so far. operators: those that would be computed. into: the concatenation it is computed into.
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
        elif node.target is _c10d.wait_tensor.default:
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
            self.kernels.append(Kernel(node, self._memory(node.all_input_nodes), (storage,), True))
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
        reads = [s for v in self._operands(node) for s in _stored(v)]
        self._values[node] = [_Value(node, storage.nbytes, (storage,))]
        self.kernels.append(Kernel(node, tuple(dict.fromkeys(reads)), (storage,), True))

    def _store(self, values: Iterable[_Value]) -> None:
        """Have the values in memory from here on."""
        for value in values:
            if not value.pending:
                continue
            value.pending = False
            reads = tuple(dict.fromkeys(s for v in value.sources for s in v.storages))
            made = value.into or Storage(value.nbytes, self.kind)
            value.storages = (made,)
            self.kernels.append(Kernel(value.node, reads, (made,), True))

    def _run(self, node: fx.Node, writes: Iterable[Storage], waits: bool = False) -> None:
        reads = self._memory(read_by(node) if waits else node.all_input_nodes)
        self.kernels.append(Kernel(node, reads, tuple(writes)))

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
