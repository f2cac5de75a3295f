"""The collectives of a rank's step, read from its AOT graphs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autoshard.compiling.built import Built
from autoshard.planning import tensor_bytes
from autoshard.runtime.collectives import EXCHANGES, FUSED_PRODUCTS, GATHER_MATMUL
from autoshard.runtime.graph_meta import CHANGE, LINE, MODULE, READER, READER_LINE
from autoshard.runtime.operators import CHUNKED_LOSS, reductions_of

_c10d = torch.ops._c10d_functional
_LOGICAL_SIZE = {  # which tensor's bytes are the size of the collective: megatron's ledger
    _c10d.all_reduce.default: ("all_reduce", "input"),
    _c10d.all_gather_into_tensor.default: ("all_gather", "output"),
    _c10d.all_gather_into_tensor_coalesced.default: ("all_gather", "output"),
    _c10d.reduce_scatter_tensor.default: ("reduce_scatter", "input"),
    _c10d.all_to_all_single.default: ("all_to_all", "input"),
    _c10d.broadcast.default: ("broadcast", "input"),
    **dict.fromkeys(EXCHANGES, ("all_to_all", "input")),  # of as many rows as expected
}


@dataclass(frozen=True, kw_only=True)
class Collective:
    """A collective of a rank's step.

    bytes is the logical size: the tensor of an all-reduce or all-to-all, the output of an
    all-gather, the input of a reduce-scatter. fused: whether it is one operator with the products
    beside it. phase is "forward" or "backward". module is the
    path of the module it serves, change the state change that causes it, stack the user's line.
    reader, reader_line: the module and the line that need the new state, where they are known.
    """

    op: str
    axis: str
    bytes: int
    phase: str
    module: str
    change: str
    stack: str
    node: fx.Node = field(repr=False, compare=False)
    reader: str = ""
    reader_line: str = ""
    fused: bool = False


def collectives_of(built: Built) -> list[Collective]:
    """The collectives of a step, forward then backward, in the order of issue."""
    axes = {axis.group: axis.name for axis in built.mesh.axes}
    found = []
    for phase, gm in (("forward", built.joint.forward), ("backward", built.joint.backward)):
        for node in gm.graph.nodes if gm is not None else ():
            if node.target in (*_LOGICAL_SIZE, *FUSED_PRODUCTS):
                # the last argument of a collective names its process group
                op, nbytes = _logical_size(node)
                found.append(_collective(node, axes[str(node.args[-1])], phase, op, nbytes))
            elif node.target is CHUNKED_LOSS and node.args[-1]:
                found += [
                    _collective(node, axes[str(node.args[-1])], phase, "all_reduce", nbytes)
                    for nbytes in reductions_of(*loss_arguments(node))
                ]
    return found


def loss_arguments(node: fx.Node) -> tuple[Any, ...]:
    """Of a loss that goes by chunks: its rows, as far as they are known, the dtype in which it is
    computed, and the operator's arguments."""
    given: Any = fx.node.map_arg(node.args, lambda one: one.meta["val"])
    hidden = given[0]
    rows = tensor_bytes(hidden) // (hidden.shape[1] * hidden.dtype.itemsize)
    return rows, node.meta["val"][0].dtype, *given


def _logical_size(node: fx.Node) -> tuple[str, int]:
    """The collective that a node is, with its bytes."""
    if node.target in FUSED_PRODUCTS:
        part: Any = node.args[0] if node.target is GATHER_MATMUL else node
        ranks: Any = node.args[-3]
        op = "all_gather" if node.target is GATHER_MATMUL else "reduce_scatter"
        return op, ranks * tensor_bytes(part.meta["val"])
    op, side = _LOGICAL_SIZE[node.target]  # type: ignore[index]
    source = node.args[0] if side == "input" else node
    assert isinstance(source, fx.Node)
    return op, sum(map(tensor_bytes, pytree.tree_leaves(source.meta["val"])))


def _collective(node: fx.Node, axis: str, phase: str, op: str, nbytes: int) -> Collective:
    custom: dict[str, Any] = node.meta.get("custom") or {}
    return Collective(
        op=op,
        axis=axis,
        bytes=nbytes,
        phase=phase,
        module=custom.get(MODULE, ""),
        change=custom.get(CHANGE, ""),
        stack=custom.get(LINE, ""),
        node=node,
        reader=custom.get(READER, ""),
        reader_line=custom.get(READER_LINE, ""),
        fused=node.target in FUSED_PRODUCTS,
    )
