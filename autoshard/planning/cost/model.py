"""The seconds of a state change, and the operations and bytes of an operator.

Collectives follow the alpha-beta model of a ring: a latency for each step, and the bytes a rank
sends over its bandwidth. The *logical size* of a collective, everywhere in this project, is in
bytes: of the tensor for an all-reduce, of the output for an all-gather, of the input for a
reduce-scatter, of the local tensor for an all-to-all.

    collective      steps     bytes a rank sends
    all_reduce      2(n-1)    2(n-1)/n * size
    all_gather        n-1      (n-1)/n * size
    reduce_scatter    n-1      (n-1)/n * size
    all_to_all        n-1      (n-1)/n * size, to other nodes over the rank's own link alone
    one-shot sum      n-1        (n-1) * size

In a graph without gradients a small all-reduce is charged as a one-shot sum, for which each rank
reads the addends of all others: so it is done on CPUs (passes/all_reduce_by_all_gather.py). NCCL's
is charged alike.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autoshard.planning import sizes as extents
from autoshard.planning.cost.machines import Link
from autoshard.planning.operators import (
    ADDED_PRODUCTS,
    ATTENTION,
    CONVOLUTIONS,
    LOOKUPS,
    PRODUCTS,
    is_causal,
    is_view,
    packet,
)
from autoshard.runtime.collectives import Axis, State, change_steps, conversions, shard_dim, step
from autoshard.runtime.masked_attention import (
    MASKED_ATTENTION,
    masked_both_ends,
    masked_prefix,
)
from autoshard.runtime.operators import attend_by_heads, attend_to_both_ends, attend_to_prefix

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")

ONE_SHOT_BYTES = 512 * 1024
"""Up to so many bytes of addends, of all ranks together, a sum is done in one shot. Gloo on two and
on four processes takes from four fifths of the time of an all-reduce to half, up to here, and more
beyond a megabyte (benchmarks/small_sums.py)."""

# A change is never free, so that of two plans with equal traffic the one with fewer changes wins
# and ties, which ranks could break differently, do not exist.
CHANGE_SECONDS = 1e-7

# A host that reads a number of the device's lets it run dry: no kernels are queued while it waits,
# and the first ones afterwards start late.
WAIT_SECONDS = 5e-5


def ring_bytes(op: str, nbytes: float, n: int) -> float:
    """Bytes each of `n` ranks sends for a collective of logical size `nbytes`."""
    if op not in COLLECTIVES:
        raise ValueError(f"unknown collective {op!r}; known: {', '.join(COLLECTIVES)}")
    return (2 if op == "all_reduce" else 1) * (n - 1) / n * nbytes


def collective_seconds(
    op: str, nbytes: float, n: int, link: Link, one_shot: bool = False, copies: int = 0
) -> float:
    """Seconds of one collective of logical size `nbytes` over `n` ranks.

    one_shot: whether a small all-reduce is a one-shot sum. copies: of rows that travel to experts,
    how many a token has.
    """
    steps, sent = ring_bytes(op, n, n), ring_bytes(op, nbytes, n)
    travels = link.exchange(sent, copies) if op == "all_to_all" else sent / link.bandwidth
    seconds = steps * link.latency + travels
    if op == "all_reduce" and one_shot and n * nbytes <= ONE_SHOT_BYTES:
        seconds = min(seconds, collective_seconds("all_gather", n * nbytes, n, link))
    return seconds


def change_collectives(src: State, dst: State) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The collectives of a state change: (in the forward pass, in the backward pass)."""
    forward, backward = change_steps(src, dst)
    return (
        (forward,) if forward in COLLECTIVES else (),
        (backward,) if backward in COLLECTIVES else (),
    )


def change_seconds(
    src: State,
    dst: State,
    nbytes_global: float,
    n: int,
    link: Link,
    differentiable: bool,
    outer: int = 0,
) -> float:
    """Seconds of a state change, forward and (where `differentiable`) backward.

    nbytes_global: bytes of the whole tensor, before it is sharded. outer: the `outer_dim` of its
    shape. Zero only where src == dst. Collectives work on the outermost dim; on another dim the
    tensor is rearranged in memory first or afterwards, which is charged as a copy.
    """
    if src == dst:
        return 0.0
    passes = conversions(src, dst)[: 2 if differentiable else 1]
    one_shot = not differentiable
    return CHANGE_SECONDS + sum(
        _conversion_seconds(a, b, nbytes_global, n, link, outer, one_shot) for a, b in passes
    )


def outer_dim(shape: Sequence[int | torch.SymInt]) -> int:
    """The last dim before which all sizes are 1: splitting it leaves each shard contiguous."""
    for dim, extent in enumerate(shape):
        if hint(extent) != 1 or not isinstance(extent, int):
            return dim
    return 0


def _conversion_seconds(
    src: State, dst: State, nbytes: float, n: int, link: Link, outer: int, one_shot: bool
) -> float:
    kind = step(src, dst)
    if kind is None or n == 1:
        return 0.0
    whole, shard = nbytes, nbytes / n
    rearranged = sum((shard_dim(state) or 0) > outer for state in (src, dst))
    if kind == "all_to_all":
        return (
            collective_seconds(kind, shard, n, link) + 2 * rearranged * shard / link.copy_bandwidth
        )
    if kind in COLLECTIVES:
        copied = 2 * rearranged * whole / link.copy_bandwidth
        return collective_seconds(kind, whole, n, link, one_shot) + copied
    read_and_written = {"scale": 2 * whole, "slice": 2 * shard, "pad": whole + shard}[kind]
    return read_and_written / link.copy_bandwidth


def hint(size: int | torch.SymInt) -> int:
    """The size as a number. One known at run time only counts as 1, which no axis can split."""
    found = extents.hint(size)
    return 1 if found is None else found


def numel(tensor: torch.Tensor) -> int:
    """Elements of a (fake) tensor, symbolic sizes counted with their hints."""
    return math.prod(hint(extent) for extent in tensor.shape)


def tensor_bytes(result: Any) -> int:
    """Bytes of the whole tensor, symbolic sizes counted with their hints; 0 for anything else."""
    return numel(result) * result.element_size() if isinstance(result, torch.Tensor) else 0


def node_bytes(node: fx.Node) -> int:
    """Bytes an operator reads and writes: inputs plus outputs.

    Nothing for a view. A lookup (an embedding, an index) reads of its table what it returns.
    """
    if not isinstance(node.target, torch._ops.OpOverload) or is_view(node):
        return 0
    args, result = _values(node)
    written = _tensor_bytes(result)
    if packet(node) in LOOKUPS:
        table, *indices = args
        return min(written, _tensor_bytes(table)) + _tensor_bytes(indices) + written
    return _tensor_bytes(args) + written


def node_flops(node: fx.Node) -> int:
    """Floating-point operations (a multiply-add is two) of a matrix-product-like operator.

    Zero for every other: memory traffic bounds those. Causal attention counts the scores that
    it does not skip, about half of the square; attention with a mask computes all.
    """
    if node.target in _OVER_CP:
        return _attention_over_cp(node)
    if not isinstance(node.target, torch._ops.OpOverload):
        return 0
    count = _FLOPS.get(node.target.overloadpacket) or _CUSTOM_FLOPS.get(node.target._schema.name)
    if count is None:
        return 0
    args, result = _values(node)
    flops = count(args, result)
    return int(flops * causal_share(node)) if is_causal(node) else flops


def causal_share(node: fx.Node) -> float:
    """The part of the square of scores that causal attention computes: a query's own key and
    those before it, of a window those in it; of documents, whose lengths a call knows, all."""
    query, key = (node.args[i].meta["val"] for i in (0, 1))  # type: ignore[union-attr]
    rows, columns = hint(query.shape[-2]), hint(key.shape[-2])
    if node.target is MASKED_ATTENTION:
        return _seen(node.args, rows) / (rows * columns)
    whole = min(rows, columns)
    seen = whole * (whole + 1) // 2 + (rows - whole) * columns
    return seen / (rows * columns)


def _seen(args: Sequence[Any], rows: int) -> int:
    """Pairs of a query and a key of masked attention; what documents leave out is not known."""
    reach = args[5] if len(args) > 5 else None
    return extents.seen_keys(rows, rows if reach is None else reach)


@dataclass(frozen=True)
class OperatorWork:
    """What an operator does on one rank, of which `Cluster.seconds` makes seconds.

    flops: operations on `dtype`. nbytes: through memory. narrowest: the smallest extent of a
    matrix product, where it is known. attention: whether the operations are attention's.
    """

    flops: float
    nbytes: float
    dtype: torch.dtype
    narrowest: float = math.inf
    attention: bool = False


def work_of(node: fx.Node) -> OperatorWork:
    """The work of an operator whose shapes are those of a rank."""
    return OperatorWork(node_flops(node), node_bytes(node), dtype_made(node))


def dtype_made(node: fx.Node) -> torch.dtype:
    """The dtype of the first tensor that an operator makes."""
    made = pytree.tree_leaves(node.meta["val"])
    return next((one.dtype for one in made if isinstance(one, torch.Tensor)), torch.float32)


def _values(node: fx.Node) -> tuple[list[Any], Any]:
    args = fx.map_arg(node.args, lambda n: n.meta.get("val"))
    kwargs = fx.map_arg(node.kwargs, lambda n: n.meta.get("val"))
    return [*args, *kwargs.values()], node.meta.get("val")


def _tensor_bytes(tree: Any) -> int:
    return sum(map(tensor_bytes, pytree.tree_leaves(tree)))


def _product(left: int) -> Callable[[Sequence[Any], Any], int]:
    """For operators whose argument `left` is contracted over its last dim."""
    return lambda args, out: 2 * numel(out) * hint(args[left].shape[-1])


def _convolution(args: Sequence[Any], out: Any, transposed: bool = False) -> int:
    weight = args[1]
    return 2 * numel(args[0] if transposed else out) * numel(weight) // hint(weight.shape[0])


def _attention(args: Sequence[Any], out: Any) -> int:
    query, key, value = args[:3]
    scores = numel(query) // hint(query.shape[-1]) * hint(key.shape[-2])
    return 2 * scores * (hint(query.shape[-1]) + hint(value.shape[-1]))


_MASKED_OVER_CP = (masked_both_ends, masked_prefix)
_OVER_CP = (attend_by_heads, attend_to_both_ends, attend_to_prefix, *_MASKED_OVER_CP)


def is_attention(node: fx.Node) -> bool:
    """Whether a node is attention, of a rank of cp too."""
    return packet(node) in ATTENTION or node.target in _OVER_CP


def _attention_over_cp(node: fx.Node) -> int:
    """Of a rank of cp, in the graph that is planned on tp; in contiguous parts, of the last."""
    args, result = _values(node)
    axis = node.kwargs["axis"]
    assert isinstance(axis, Axis)
    flops, n = _attention(args, result), axis.size
    by_heads = node.target is attend_by_heads  # its keys are those of a rank until exchanged
    if node.target in _MASKED_OVER_CP or node.kwargs.get("op") is MASKED_ATTENTION:
        length = hint(args[1].shape[-2]) * (n if by_heads else 1)
        share = _seen(args, length) / length**2
        return int(flops * share * (n if by_heads else 1))
    if by_heads:
        causal = node.kwargs.get("is_causal", len(args) > 5 and args[5] is True)
        return flops * n // (2 if causal else 1)
    return flops // 2 if node.target is attend_to_both_ends else flops * (2 * n - 1) // (2 * n)


def _einsum(args: Sequence[Any], out: Any) -> int:
    equation, tensors = args[:2]
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if len(terms) < 2:
        return 0
    sizes: dict[str, int] = {}
    for term, tensor in zip(terms, tensors, strict=True):
        head, _, tail = term.partition("...")
        extents_of = [hint(extent) for extent in tensor.shape]
        sizes.update(zip(head, extents_of, strict=False))
        sizes.update(zip(reversed(tail), reversed(extents_of), strict=False))
    kept = right if arrow else [letter for letter in sizes if left.count(letter) == 1]
    contracted = math.prod(size for letter, size in sizes.items() if letter not in kept)
    return 2 * (len(terms) - 1) * numel(out) * contracted


def _recurrent(args: Sequence[Any], out: Any) -> int:
    # A padded input has the flag `has_biases` after the weights, a packed one has it a place later.
    weights = args[2] if isinstance(args[3], bool) else args[3]
    tokens = numel(args[0]) // hint(args[0].shape[-1])
    return 2 * tokens * sum(numel(w) for w in weights if w.dim() == 2)


def _experts(args: Sequence[Any], out: Any) -> int:
    ids, stacks = args[1], args[3]
    matrices = [stack for stack in stacks if stack.dim() == 3]
    return 2 * numel(ids) * sum(numel(each) // hint(each.shape[0]) for each in matrices)


def _gathered_products(args: Sequence[Any], out: Any) -> int:
    shard, weights = args[:2]
    return sum(2 * numel(made) * hint(shard.shape[-1]) for made in out[len(out) - len(weights) :])


_aten = torch.ops.aten
_FLOPS: dict[Any, Callable[[Sequence[Any], Any], int]] = {
    **dict.fromkeys(PRODUCTS - ADDED_PRODUCTS - CONVOLUTIONS, _product(0)),
    **dict.fromkeys(ADDED_PRODUCTS, _product(1)),
    **dict.fromkeys((_aten.conv1d, _aten.conv2d, _aten.conv3d), _convolution),
    **dict.fromkeys(
        (_aten.conv_transpose1d, _aten.conv_transpose2d, _aten.conv_transpose3d),
        partial(_convolution, transposed=True),
    ),
    **dict.fromkeys(
        (_aten.convolution, _aten._convolution),
        lambda args, out: _convolution(args, out, args[6]),
    ),
    **dict.fromkeys((_aten.lstm, _aten.gru, _aten.rnn_tanh, _aten.rnn_relu), _recurrent),
    **dict.fromkeys(ATTENTION, _attention),
    _aten.einsum: _einsum,
}
# Operators by name: those of other libraries exist only once the library is imported.
_CUSTOM_FLOPS: dict[str, Callable[[Sequence[Any], Any], int]] = {
    "transformers::grouped_mm_fallback": _product(0),
    "autoshard::experts": _experts,
    "autoshard::all_gather_matmul": _gathered_products,
    "autoshard::matmul_reduce_scatter": lambda args, out: (
        2 * numel(args[0]) * hint(args[1].shape[1])
    ),
}
