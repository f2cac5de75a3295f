"""Sizes, and operators that move values without changing them.

Lookups by index.
"""

import operator
from typing import Any

import torch
from torch import fx

from autoshard.export.to_tensorrt.converters.arithmetic import elementwise
from autoshard.export.to_tensorrt.converters.network import DynamicSize, Lowering, Tensor, converts
from autoshard.passes import permutation
from autoshard.planning import arguments

aten = torch.ops.aten

_ARITHMETIC: dict[Any, str] = {
    operator.add: "SUM",
    operator.sub: "SUB",
    operator.mul: "PROD",
    operator.floordiv: "FLOOR_DIV",
    torch.sym_max: "MAX",
    torch.sym_min: "MIN",
}


@converts(aten.sym_size.int)
def size(low: Lowering, node: fx.Node) -> DynamicSize:
    dim: Any = node.args[1]
    return low.size(low[node.args[0]], dim)


@converts(*_ARITHMETIC)
def arithmetic(low: Lowering, node: fx.Node) -> DynamicSize:
    left, right = (low[arg] for arg in node.args)
    if isinstance(left, int) and isinstance(right, int):
        return node.target(left, right)  # type: ignore[operator]
    target: Any = node.target
    return elementwise(low, low.sizes([left]), low.sizes([right]), _ARITHMETIC[target])


@converts(operator.getitem)
def getitem(low: Lowering, node: fx.Node) -> Any:
    """One of several results."""
    return low[node.args[0]][node.args[1]]


@converts(aten.reshape.default)
def reshape(low: Lowering, node: fx.Node) -> Tensor:
    """Other sizes, the same values in order. At most one size is left to be inferred."""
    known = node.meta["val"].shape
    given: Any = node.args[1]
    sizes = [k if isinstance(k, int) else low[g] for k, g in zip(known, given, strict=True)]
    layer = low.add("add_shuffle", low[node.args[0]])
    open_sizes = [i for i, s in enumerate(sizes) if not isinstance(s, int) or s < 0]
    if len(open_sizes) <= 1:
        layer.reshape_dims = tuple(-1 if i in open_sizes else s for i, s in enumerate(sizes))
    else:
        layer.set_input(1, low.sizes(sizes))
    layer.zero_is_placeholder = False
    return layer.get_output(0)


@converts(aten.permute.default, aten.transpose.int)
def permute(low: Lowering, node: fx.Node) -> Tensor:
    layer = low.add("add_shuffle", low[node.args[0]])
    layer.first_transpose = tuple(permutation(node) or ())
    return layer.get_output(0)


@converts(aten.unsqueeze.default)
def unsqueeze(low: Lowering, node: fx.Node) -> Tensor:
    """A dim of size 1 more."""
    x, dim = low[node.args[0]], node.args[1]
    axes = low.constant(torch.tensor([dim % (len(x.shape) + 1)]))  # type: ignore[operator]
    return low.out("add_unsqueeze", x, axes)


@converts(aten.squeeze.dim)
def squeeze(low: Lowering, node: fx.Node) -> Tensor:
    """A dim of size 1 less."""
    x, dim = low[node.args[0]], node.args[1]
    if len(node.meta["val"].shape) == len(x.shape):
        return x
    return low.out("add_squeeze", x, low.constant(torch.tensor([dim % len(x.shape)])))  # type: ignore[operator]


@converts(aten.expand.default)
def expand(low: Lowering, node: fx.Node) -> Tensor:
    """Dims of size 1 repeated, by slices of step 0."""
    given: Any = node.args[1]
    x = low.with_rank(low[node.args[0]], len(given))
    sizes: list[DynamicSize] = []
    steps = []
    for dim, (wanted, result) in enumerate(zip(given, node.meta["val"].shape, strict=True)):
        repeated = x.shape[dim] == 1
        if isinstance(result, int):
            sizes.append(result)
        elif repeated and not (isinstance(wanted, int) and wanted == -1):
            sizes.append(low[wanted])
        else:
            sizes.append(low.size(x, dim))
        steps.append(0 if repeated and sizes[-1] != 1 else 1)
    return low.slice(x, [0] * len(sizes), sizes, steps)


@converts(aten.slice.Tensor)
def part(low: Lowering, node: fx.Node) -> Tensor:
    """A range of one dim, its bounds cut to the size as Python does."""
    given = arguments(node)
    x = low[given["self"]]
    rank = len(x.shape)
    dim, step = given["dim"] % rank, given["step"]
    result = node.meta["val"].shape[dim]
    start = low[given["start"] or 0]
    starts: list[DynamicSize] = [0] * rank
    sizes: list[DynamicSize] = [low.size(x, d) if d != dim else 0 for d in range(rank)]
    full = sizes[dim] = low.size(x, dim)
    if not isinstance(start, int):
        if not _at_least_0(given["start"]) or not isinstance(full, int) or step != 1:
            raise low.error("starts at a place that depends on a dynamic size")
        if given["end"] is not None and low[given["end"]] < full:
            raise low.error("starts and ends at places that depend on a dynamic size")
        starts[dim] = start = elementwise(low, low.sizes([start]), low.sizes([full]), "MIN")
        sizes[dim] = elementwise(low, low.sizes([full]), start, "SUB")
        return low.slice(x, starts, sizes, [1] * rank)
    if start < 0:
        if not isinstance(full, int):
            raise low.error("starts at a place that depends on a dynamic size")
        start = max(full + start, 0)
    starts[dim] = min(start, full) if isinstance(full, int) else start
    if isinstance(result, int):
        sizes[dim] = result
    else:
        sizes[dim] = _dynamic_length(low, given, start, full, step)
    return low.slice(x, starts, sizes, [step if d == dim else 1 for d in range(rank)])


def _at_least_0(start: fx.Node) -> bool:
    """Whether a dynamic start never counts from the end."""
    return start.target is torch.sym_max and any(n == 0 for n in start.args if isinstance(n, int))


def _dynamic_length(
    low: Lowering, given: Any, start: int, full: DynamicSize, step: int
) -> DynamicSize:
    """How many a range of a dynamic dim has."""
    end = low[given["end"]]
    if step != 1:
        raise low.error(f"takes every {step}th of a dim of dynamic size")
    if end is None or (isinstance(end, int) and end >= 2**31):
        length = full
    elif isinstance(end, int) and end < 0:
        length = elementwise(low, full, low.sizes([end]), "SUM")
    else:
        length = elementwise(low, low.sizes([full]), low.sizes([end]), "MIN")
    return elementwise(low, length, low.sizes([start]), "SUB") if start else length


@converts(aten.select.int)
def select(low: Lowering, node: fx.Node) -> Tensor:
    x, index = low[node.args[0]], low[node.args[2]]
    dim: Any = node.args[1]
    if not isinstance(index, int):
        raise low.error("selects by an index that depends on a size")
    dim %= len(x.shape)
    if index < 0:
        full = low.size(x, dim)
        if isinstance(full, int):
            place = full + index
        else:
            place = elementwise(low, full, low.sizes([index]), "SUM")
    else:
        place = index
    indices = low.sizes([place])
    chosen = low.out("add_gather", x, indices, dim)
    return low.out("add_squeeze", chosen, low.constant(torch.tensor([dim])))


@converts(aten.cat.default)
def cat(low: Lowering, node: fx.Node) -> Tensor:
    given, val = arguments(node), node.meta["val"]
    layer = low.add("add_concatenation", [low.cast(low[p], val.dtype) for p in given["tensors"]])
    layer.axis = given["dim"] % val.dim()
    return layer.get_output(0)


@converts(aten.arange.start_step)
def arange(low: Lowering, node: fx.Node) -> Tensor:
    """Numbers in equal steps."""
    start, end, step = (low[arg] for arg in (*node.args, 1)[:3])
    val = node.meta["val"]
    if isinstance(val.shape[0], int):
        return low.constant(torch.arange(start, end, step, dtype=val.dtype))
    if step != 1 or not isinstance(start, int) or val.dtype.is_floating_point:
        raise low.error(f"counts from {start} in steps of {step} to a dynamic end")
    count = low.sizes([end])
    if start:
        count = elementwise(low, count, low.sizes([start]), "SUB")
    operation = low.trt.FillOperation.LINSPACE
    layer = low.add("add_fill", (1,), operation, low.dtype(torch.int64))
    layer.set_input(0, count)
    layer.set_input(1, low.scalar(start, torch.int64))
    layer.set_input(2, low.constant(torch.ones(1, dtype=torch.int64)))
    return low.cast(layer.get_output(0), val.dtype)


@converts(aten.full.default)
def full(low: Lowering, node: fx.Node) -> Tensor:
    sizes: Any = node.args[0]
    val = node.meta["val"]
    one = low.scalar(node.args[1], val.dtype, val.dim())
    wanted = [s if isinstance(s, int) else low[g] for s, g in zip(val.shape, sizes, strict=True)]
    if all(isinstance(s, int) and s == 1 for s in wanted):
        return one
    steps = [0 if not (isinstance(s, int) and s == 1) else 1 for s in wanted]
    return low.slice(one, [0] * len(wanted), wanted, steps)


@converts(aten.embedding.default)
def embedding(low: Lowering, node: fx.Node) -> Tensor:
    """Rows of a table."""
    return low.out("add_gather", low[node.args[0]], low[node.args[1]], 0)


@converts(aten.index_select.default)
def index_select(low: Lowering, node: fx.Node) -> Tensor:
    """Entries of one dim."""
    x, dim = low[node.args[0]], node.args[1]
    return low.out("add_gather", x, low[node.args[2]], dim % len(x.shape))  # type: ignore[operator]


@converts(aten.gather.default)
def gather(low: Lowering, node: fx.Node) -> Tensor:
    """For each entry of an index, the entry of one dim at that number."""
    x, dim, where = low[node.args[0]], node.args[1], low[node.args[2]]
    layer = low.add("add_gather_v2", x, where, low.trt.GatherMode.ELEMENT)
    layer.axis = dim % len(x.shape)  # type: ignore[operator]
    return layer.get_output(0)


@converts(aten.scatter.src)
def scatter(low: Lowering, node: fx.Node) -> Tensor:
    """A tensor with values written at an index of one dim."""
    index, source = (arg.meta["val"].shape for arg in node.args[2:4])  # type: ignore[union-attr]
    if str(index) != str(source):
        raise low.error(f"writes {tuple(source)} at an index of {tuple(index)}: a part of it")
    x, dim, where, values = (low[arg] for arg in node.args)
    layer = low.add("add_scatter", x, where, values, low.trt.ScatterMode.ELEMENT)
    layer.axis = dim % len(x.shape)
    return layer.get_output(0)


@converts(aten.index.Tensor)
def index(low: Lowering, node: fx.Node) -> Tensor:
    """Entries of one dim by an index of any shape."""
    indices: Any = node.args[1]
    given = [(dim, i) for dim, i in enumerate(indices) if i is not None]
    if len(given) != 1 or given[0][1].meta["val"].dtype == torch.bool:
        raise low.error(
            f"looks up by {len(given)} indices; engines look up by one index of whole numbers"
        )
    dim, where = given[0]
    x, val = low[node.args[0]], where.meta["val"]
    return low.out("add_gather", x, _from_the_end(low, x, dim, low[where], val), dim)


def _from_the_end(low: Lowering, x: Tensor, dim: int, where: Tensor, val: torch.Tensor) -> Tensor:
    """An index, what is below 0 counted from the end: engines count from the start only."""
    rank = val.dim()
    size = low.cast(low.sizes([low.size(x, dim)]), val.dtype)
    if rank == 0:
        size = low.out("add_squeeze", size, low.constant(torch.zeros(1, dtype=torch.int64)))
    below = elementwise(low, where, low.scalar(0, val.dtype, rank), "LESS")
    moved = elementwise(low, where, low.with_rank(size, rank), "SUM")
    return low.out("add_select", below, moved, where)
