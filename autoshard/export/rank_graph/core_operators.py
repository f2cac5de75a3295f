"""reduce_to_core: a graph is made of the operators that exporters know, and of no others.

    before                                      after
    %0: f32[b,s,4] = rms_norm(%x, [4], %w)      %0: f32[b,s,4] = mul(%x, %x)
                                                %1: f32[b,s,1] = mean(%0, [2], True)
                                                %2: f32[b,s,1] = rsqrt(add(%1, 1e-6))
                                                %3: f32[b,s,4] = mul(mul(%x, %2), %w)

It is traced again with decompositions until only `CORE` is left, or nothing more can be
decomposed; what is left then has no name here, and an exporter says so, node by node.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch._ops import OpOverload
from torch.fx.experimental.proxy_tensor import make_fx

from autoshard.export.rank_graph.graph import fake_mode_of
from autoshard.passes import Context, Pass, Report

aten = torch.ops.aten
_c10d = torch.ops._c10d_functional

POINTWISE = (
    *(aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.div.Tensor_mode),
    *(aten.pow.Tensor_Scalar, aten.pow.Tensor_Tensor, aten.maximum.default, aten.minimum.default),
    *(aten.neg.default, aten.abs.default, aten.exp.default, aten.log.default, aten.sqrt.default),
    *(aten.rsqrt.default, aten.reciprocal.default, aten.sin.default, aten.cos.default),
    *(aten.tanh.default, aten.sigmoid.default, aten.relu.default, aten.silu.default),
    *(aten.gelu.default, aten.erf.default, aten.floor.default, aten.ceil.default),
    *(aten.eq.Tensor, aten.ne.Tensor, aten.lt.Tensor, aten.le.Tensor, aten.gt.Tensor),
    *(aten.ge.Tensor, aten.eq.Scalar, aten.ne.Scalar, aten.lt.Scalar, aten.le.Scalar),
    *(aten.gt.Scalar, aten.ge.Scalar, aten.bitwise_and.Tensor, aten.bitwise_or.Tensor),
    *(aten.bitwise_not.default, aten.logical_and.default, aten.logical_or.default),
    *(aten.logical_not.default, aten.where.self, aten.clamp.default, aten._to_copy.default),
)
PRODUCTS = (aten.linear.default, aten.matmul.default, aten.addmm.default)
OVER_DIMS = (  # of the first operand
    *(aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default),
    *(aten.any.dim, aten.cumsum.default, aten.softmax.int, aten._softmax.default),
    *(aten.topk.default, aten.argmax.default, aten.layer_norm.default),
)
CORE: frozenset[Any] = frozenset(
    (
        *(*POINTWISE, *PRODUCTS, *OVER_DIMS, aten.scaled_dot_product_attention.default),
        *(aten.convolution.default, aten.max_pool2d_with_indices.default),
        *(aten.embedding.default, aten.index.Tensor, aten.index_select.default),
        *(aten.gather.default, aten.scatter.src, aten.sym_size.int),
        *(aten.reshape.default, aten.permute.default, aten.transpose.int, aten.expand.default),
        *(aten.unsqueeze.default, aten.squeeze.dim, aten.slice.Tensor, aten.select.int),
        *(aten.cat.default, aten.arange.start_step, aten.full.default),
        *(_c10d.all_reduce.default, _c10d.all_gather_into_tensor.default),
        *(_c10d.reduce_scatter_tensor.default, _c10d.all_to_all_single.default),
        *(_c10d.broadcast.default, _c10d.wait_tensor.default),
    )
)
"""Every ATen operator and collective a normalised graph may hold."""

_ROUNDS = 3  # a decomposition may leave what only another one knows


@dataclass(frozen=True)
class ReduceToCore(Pass):
    """See the module's text: the graph is traced again, on the CPU; nodes keep `stack_trace`."""

    def rewrite(self, gm: fx.GraphModule, ctx: Context, report: Report) -> None:
        mode, table = fake_mode_of(gm.graph), dict(_table())
        fakes, made = _on_cpu(gm, mode), gm
        for _ in range(_ROUNDS):
            made = _trace(made, fakes, mode, table)
            report.hits += 1
            left = {n.target for n in made.graph.nodes if n.op == "call_function"} - CORE
            composite = {t for t in left if isinstance(t, OpOverload) and t not in table}
            if left.isdisjoint(table) and not composite:
                break
            # torch's table leaves out composite views; one that is no composite stays as it is
            table |= {target: target.decompose for target in composite}
        for node in made.graph.find_nodes(op="get_attr"):
            setattr(gm, str(node.target), getattr(made, str(node.target)))
        gm.graph = made.graph


def _on_cpu(gm: fx.GraphModule, mode: Any) -> list[Any]:
    """Take every device out of the nodes of `gm`; the placeholders' values, on the CPU."""
    values = []
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            val = node.meta["val"]
            if isinstance(val, torch.Tensor):
                with mode:
                    val = torch.empty(val.shape, dtype=val.dtype)
            values.append(val)
        elif node.op == "call_function" and "device" in node.kwargs:
            node.kwargs = {k: v for k, v in node.kwargs.items() if k != "device"}
    gm.recompile()
    return values


def _trace(
    gm: fx.GraphModule, fakes: Sequence[Any], mode: Any, table: dict[Any, Callable[..., Any]]
) -> fx.GraphModule:
    def run(*values: Any) -> Any:
        return fx.Interpreter(gm).run(*values)

    # tensors that forward makes of numbers are held by the graph, and are not the mode's
    held = mock.patch.object(mode, "allow_non_fake_inputs", True)
    with mode, held, torch.no_grad(), fx.traceback.preserve_node_meta():
        traced = make_fx(run, pre_dispatch=True, decomposition_table=table)(*fakes)
    traced.graph.eliminate_dead_code()
    return traced


@functools.cache
def _table() -> dict[Any, Callable[..., Any]]:
    """What replaces each operator outside of CORE that can be replaced."""
    known = torch.export.default_decompositions()
    table = {target: decompose for target, decompose in known.items() if target not in CORE}
    return {**table, **_OWN}


def _split_with_sizes(x: torch.Tensor, sizes: Sequence[int], dim: int = 0) -> list[torch.Tensor]:
    parts, start = [], 0
    for size in sizes:
        parts.append(aten.slice.Tensor(x, dim, start, start + size))
        start += size
    return parts


def _pow_scalar(base: Any, exponent: torch.Tensor) -> torch.Tensor:
    return aten.pow.Tensor_Tensor(
        torch.full((), base, dtype=exponent.dtype, device=exponent.device), exponent
    )


def _pad(x: torch.Tensor, pad: Sequence[int], value: Any = 0) -> torch.Tensor:
    """Constant padding as concatenation; negative padding cuts."""
    for i in range(len(pad) // 2):
        dim = x.dim() - 1 - i
        before, after = pad[2 * i], pad[2 * i + 1]
        parts = [x]
        for amount, place in ((before, 0), (after, 1)):
            if isinstance(amount, int) and amount == 0:
                continue
            shape = [*x.shape[:dim], amount, *x.shape[dim + 1 :]]
            block = aten.full.default(shape, value, dtype=x.dtype, device=x.device)
            parts.insert(len(parts) * place, block)
        if len(parts) > 1:
            x = aten.cat.default(parts, dim)
    return x


def _repeat(x: torch.Tensor, repeats: Sequence[Any]) -> torch.Tensor:
    """Each dim, from the last to the first, as many times as asked, after dims put in front."""
    for _ in range(len(repeats) - x.dim()):
        x = aten.unsqueeze.default(x, 0)
    for dim, times in enumerate(repeats):
        if isinstance(times, int) and times == 1:
            continue
        size = x.shape[dim]
        if isinstance(size, int) and size == 1:
            wide = [times if d == dim else -1 for d in range(x.dim())]
            x = aten.expand.default(x, wide)
            continue
        shape = list(x.shape)
        wide = [*shape[:dim], times, *shape[dim:]]
        x = aten.expand.default(aten.unsqueeze.default(x, dim), wide)
        x = aten.reshape.default(x, [*shape[:dim], times * size, *shape[dim + 1 :]])
    return x


def _index(x: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> Any:
    """Several indices of neighbouring dims as one of these dims joined."""
    dims = [dim for dim, index in enumerate(indices) if index is not None]
    given = [index for index in indices if index is not None]
    joined = len(dims) > 1 and dims == list(range(dims[0], dims[0] + len(dims)))
    if not joined or any(index.dtype == torch.bool for index in given):
        return NotImplemented
    flat: Any = None
    for dim, index in zip(dims, given):
        size = x.shape[dim]
        inside = aten.where.self(aten.lt.Scalar(index, 0), aten.add.Tensor(index, size), index)
        flat = inside if flat is None else aten.add.Tensor(aten.mul.Tensor(flat, size), inside)
    rest = list(x.shape)
    x = aten.reshape.default(x, [*rest[: dims[0]], -1, *rest[dims[-1] + 1 :]])
    return aten.index.Tensor(x, [None] * dims[0] + [flat])


def _slice_scatter(
    x: torch.Tensor,
    src: torch.Tensor,
    dim: int = 0,
    start: Any = None,
    end: Any = None,
    step: int = 1,
) -> Any:
    """What is written into a range of a dim, between what stays before and behind it."""
    size = x.shape[dim]
    if step != 1:
        return NotImplemented
    start = 0 if start is None else start
    end = size if end is None or (isinstance(end, int) and end >= 2**31) else end
    start, end = (n + size if isinstance(n, int) and n < 0 else n for n in (start, end))
    parts = [src]
    if not (isinstance(start, int) and start == 0):
        parts.insert(0, aten.slice.Tensor(x, dim, 0, start))
    if end is not size and not (isinstance(end, int) and isinstance(size, int) and end >= size):
        parts.append(aten.slice.Tensor(x, dim, end, size))
    return aten.cat.default(parts, dim) if len(parts) > 1 else src


def _scatter_value(x: torch.Tensor, dim: int, index: torch.Tensor, value: Any) -> torch.Tensor:
    """A number at each index of a dim: chosen where any index is the place."""
    turned = aten.transpose.int(index, dim, -1)
    places = aten.arange.start_step(0, x.shape[dim], 1, dtype=torch.int64, device=x.device)
    picked = aten.eq.Tensor(aten.unsqueeze.default(turned, -1), places)
    picked = aten.transpose.int(aten.any.dim(picked, -2), dim, -1)
    block = aten.full.default([1] * x.dim(), value, dtype=x.dtype, device=x.device)
    return aten.where.self(picked, block, x)


def _batch_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    variance: torch.Tensor,
    momentum: float,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """By the statistics of training, as one factor and one term of each channel."""

    def column(value: torch.Tensor) -> torch.Tensor:
        shape = [value.shape[0], *[1] * (x.dim() - 2)]
        return aten._to_copy.default(aten.reshape.default(value, shape), dtype=x.dtype)

    factor = aten.rsqrt.default(aten.add.Tensor(variance, eps))
    if weight is not None:
        factor = aten.mul.Tensor(factor, weight)
    term = aten.neg.default(aten.mul.Tensor(mean, factor))
    if bias is not None:
        term = aten.add.Tensor(term, bias)
    y = aten.add.Tensor(aten.mul.Tensor(x, column(factor)), column(term))
    none = aten.full.default([0], 0, dtype=x.dtype, device=x.device)
    return y, none, none


def _group_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    batch: Any,
    channels: int,
    inner: Any,
    groups: int,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Each group less its mean by its deviation, in float32, then a factor and a term of each
    channel."""
    wide = aten._to_copy.default(x, dtype=torch.float32)
    flat = aten.reshape.default(wide, [batch, groups, -1])
    mean = aten.mean.dim(flat, [-1], True)
    flat = aten.sub.Tensor(flat, mean)
    variance = aten.mean.dim(aten.mul.Tensor(flat, flat), [-1], True)
    scale = aten.rsqrt.default(aten.add.Tensor(variance, eps))
    y = aten.reshape.default(aten.mul.Tensor(flat, scale), x.shape)
    column = [channels, *[1] * (x.dim() - 2)]
    if weight is not None:
        y = aten.mul.Tensor(y, aten.reshape.default(weight, column))
    if bias is not None:
        y = aten.add.Tensor(y, aten.reshape.default(bias, column))
    return aten._to_copy.default(y, dtype=x.dtype), mean, scale


def _vector_norm(
    x: torch.Tensor,
    ord: float = 2,
    dim: Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Any:
    """The root of the sum of squares, such as weight norm takes."""
    if ord != 2 or dtype is not None:
        return NotImplemented
    dims = list(range(x.dim())) if dim is None else list(dim)
    return aten.sqrt.default(aten.sum.dim_IntList(aten.mul.Tensor(x, x), dims, keepdim))


def _as_strided(x: torch.Tensor, size: Any, stride: Any, offset: Any = None) -> Any:
    """What pooling does to the strides of dims of size 1: the same values."""
    wide = [dim for dim in range(x.dim()) if x.shape[dim] != 1]
    alike = all(stride[dim] == x.stride(dim) for dim in wide)
    return x if list(size) == list(x.shape) and alike and not offset else NotImplemented


def _empty(size: Sequence[Any], **kwargs: Any) -> torch.Tensor:
    kwargs.pop("memory_format", None)
    return aten.full.default(size, 0, **kwargs)


def _full_like(x: torch.Tensor, value: Any, *, dtype: Any = None, **kwargs: Any) -> torch.Tensor:
    """Of a size, not of a value: what it makes depends on no input."""
    return aten.full.default(x.shape, value, dtype=dtype or x.dtype, device=x.device)


_OWN: dict[Any, Callable[..., Any]] = {
    aten.split_with_sizes.default: _split_with_sizes,
    aten.view.default: lambda x, size: aten.reshape.default(x, size),
    aten.pow.Scalar: _pow_scalar,
    aten.full_like.default: _full_like,
    aten.empty.memory_format: _empty,
    aten.copy.default: lambda x, src, non_blocking=False: aten.expand.default(
        aten._to_copy.default(src, dtype=x.dtype), x.shape
    ),
    aten.index.Tensor: _index,
    aten.repeat.default: _repeat,
    aten.slice_scatter.default: _slice_scatter,
    aten.scatter.value: _scatter_value,
    aten.max.dim: lambda x, dim, keepdim=False: (
        aten.amax.default(x, [dim], keepdim),
        aten.argmax.default(x, dim, keepdim),
    ),
    aten._native_batch_norm_legit_no_training.default: _batch_norm,
    aten.as_strided_.default: _as_strided,
    aten.native_group_norm.default: _group_norm,
    aten.linalg_vector_norm.default: _vector_norm,
    aten.isinf.default: lambda x: aten.eq.Scalar(aten.abs.default(x), float("inf")),
    aten.log1p.default: lambda x: aten.log.default(aten.add.Tensor(x, 1)),
    aten.any.default: lambda x: aten.any.dim(x.reshape(-1), 0),
    aten.constant_pad_nd.default: _pad,
    aten.pad.default: lambda x, pad, mode="constant", value=None: _pad(x, pad, value or 0),
    aten.mm.default: lambda x, y: aten.matmul.default(x, y),
    aten.bmm.default: lambda x, y: aten.matmul.default(x, y),
    aten.add.Scalar: lambda x, y, alpha=1: aten.add.Tensor(x, y * alpha),
    aten.sub.Scalar: lambda x, y, alpha=1: aten.sub.Tensor(x, y * alpha),
    aten.mul.Scalar: lambda x, y: aten.mul.Tensor(x, y),
    aten.div.Scalar: lambda x, y: aten.div.Tensor(x, y),
    aten.rsub.Scalar: lambda x, y, alpha=1: aten.add.Tensor(aten.mul.Tensor(x, -alpha), y),
    aten.to.dtype: lambda x, dtype, *rest, **more: aten._to_copy.default(x, dtype=dtype),
    aten.scalar_tensor.default: lambda value, **kwargs: aten.full.default([], value, **kwargs),
}
