"""Sample calls for the rule oracle: at least one for every rule, in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers.integrations.moe  # noqa: F401  (defines transformers::grouped_mm_fallback)

from oracle import Sample

BOTH = (2, 4)
_generator = torch.Generator().manual_seed(1)


def f(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=_generator)


def positive(*shape: int) -> torch.Tensor:
    return f(*shape).abs() + 0.5


def ints(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(high, shape, generator=_generator)


def mask(*shape: int) -> torch.Tensor:
    return ints(2, *shape).bool()


def matrices() -> Iterator[Sample]:
    yield Sample("aten.linear", (f(4, 6, 8), f(12, 8), f(12)), n=BOTH)
    yield Sample("aten.linear", (f(3, 7), f(5, 7), None), n=BOTH)
    yield Sample("aten.linear", (f(8), f(12, 8), f(12)))
    for recipe in ("float8", "float8_rowwise"):
        yield Sample("autoshard.float8_linear", (f(4, 6, 64), f(64, 64), recipe), n=BOTH)
    yield Sample("aten.mm", (f(4, 7), f(7, 6)), n=BOTH)
    yield Sample("aten.bmm", (f(4, 3, 6), f(4, 6, 5)), n=BOTH)
    yield Sample("aten.mv", (f(4, 6), f(6)))
    yield Sample("aten.dot", (f(6), f(6)))
    yield Sample("aten.outer", (f(4), f(6)))
    yield Sample("aten.addmm", (f(12), f(6, 8), f(8, 12)), n=BOTH)
    yield Sample("aten.addmm", (f(6, 12), f(6, 8), f(8, 12)), {"beta": 2, "alpha": 3})
    yield Sample("aten.addmm", (f(1, 12), f(6, 8), f(8, 12)))
    yield Sample("aten.addmm", (f(6, 1), f(6, 8), f(8, 12)))
    yield Sample("aten.addmm", (f(), f(6, 8), f(8, 12)))
    yield Sample("aten.addmv", (f(4), f(4, 6), f(6)))
    yield Sample("aten.baddbmm", (f(4, 3, 5), f(4, 3, 6), f(4, 6, 5)), {"beta": 0.5})
    yield Sample("aten.baddbmm", (f(1, 1, 5), f(4, 3, 6), f(4, 6, 5)))
    yield Sample("aten.baddbmm", (f(3, 5), f(4, 3, 6), f(4, 6, 5)))
    yield Sample("aten.baddbmm", (f(5), f(4, 3, 6), f(4, 6, 5)))
    yield Sample("aten.baddbmm", (f(), f(4, 3, 6), f(4, 6, 5)))
    yield Sample("aten.matmul", (f(2, 4, 3, 6), f(4, 6, 5)), n=BOTH)
    yield Sample("aten.matmul", (f(2, 1, 3, 6), f(1, 4, 6, 5)))
    yield Sample("aten.matmul", (f(6), f(4, 6, 5)))
    yield Sample("aten.matmul", (f(4, 3, 6), f(6)))
    yield Sample("aten.matmul", (f(6), f(6)))
    yield Sample("aten.einsum", ("bij,jk->bik", [f(2, 4, 6), f(6, 8)]))
    yield Sample("aten.einsum", ("bqhd,bkhd->bhqk", [f(2, 4, 6, 8), f(2, 5, 6, 8)]))
    yield Sample("aten.einsum", ("ij,jk", [f(4, 6), f(6, 8)]))
    yield Sample("aten.einsum", ("ij->ji", [f(4, 6)]))
    yield Sample("aten.einsum", ("ij,ij,ij->i", [f(4, 6), f(1, 6), f(4, 6)]))
    lower = f(4, 3, 3).tril() + 3 * torch.eye(3)
    yield Sample("aten.linalg_solve_triangular", (lower, f(4, 3, 5)), kwargs={"upper": False})
    yield Sample("aten.bilinear", (f(4, 6), f(4, 8), f(2, 6, 8), f(2)))
    offsets = torch.tensor([2, 5, 5, 8], dtype=torch.int32)
    operands = (f(8, 16).float(), f(4, 16, 32).float(), offsets)
    yield Sample("aten._grouped_mm", operands)
    yield Sample("transformers.grouped_mm_fallback", operands)


def elementwise() -> Iterator[Sample]:
    a, b = f(4, 6), f(4, 6)
    for op in ["add.Tensor", "sub.Tensor", "rsub.Tensor"]:
        yield Sample(f"aten.{op}", (a, b), {"alpha": 2})
        yield Sample(f"aten.{op}", (a, f(6)))
        yield Sample(f"aten.{op}", (a, f(4, 1)))
    yield Sample("aten.add.Tensor", (a, 1.5))
    yield Sample("aten.add.Tensor", (a, ints(5, 4, 6)))
    yield Sample("aten.add.Tensor", (a, f(7, 4, 6)), n=BOTH)
    yield Sample("aten.mul.Tensor", (a, b))
    yield Sample("aten.mul.Tensor", (a, 2.0))
    yield Sample("aten.mul.Tensor", (a, f()))
    yield Sample("aten.mul.Tensor", (a, f(4, 1)))
    yield Sample("aten.mul.Tensor", (a, mask(4, 6)))
    for op in ["mul.Scalar", "div.Scalar"]:
        yield Sample(f"aten.{op}", (a, 3))
    for op in ["div.Tensor", "true_divide.Tensor"]:
        yield Sample(f"aten.{op}", (a, positive(4, 6)))
        yield Sample(f"aten.{op}", (a, positive(6)))
        yield Sample(f"aten.{op}", (a, 2.0))
    for op in ["neg", "positive", "clone", "contiguous", "alias", "detach", "lift_fresh_copy"]:
        yield Sample(f"aten.{op}", (a,))
    yield Sample("aten._to_copy", (a,), {"dtype": torch.float64})
    yield Sample("aten._to_copy", (ints(9, 4),), {"dtype": torch.float64})
    yield Sample("aten._to_copy", (a,), {"dtype": torch.int64})
    cpu = torch.device("cpu")
    yield Sample("aten.to.dtype", (a, torch.float64))
    yield Sample("aten.to.dtype", (a, torch.int64))
    yield Sample("aten.to.device", (a, cpu, torch.float64))
    yield Sample("aten.to.dtype_layout", (a,), {"dtype": torch.float64, "device": cpu})
    yield Sample("aten.to.prim_Device", (a, cpu))
    yield Sample("aten.to.prim_dtype", (a, torch.float64))
    yield Sample("aten.expand_as", (f(4, 1), a))
    yield Sample("aten.expand_as", (f(6), a))
    yield Sample("aten.copy", (a, b), constant=(0, 1))
    yield Sample("aten.copy", (a, f(6)), constant=(0, 1))
    yield Sample("aten.where.self", (mask(4, 6), a, b))
    yield Sample("aten.where.self", (mask(4, 1), a, f()))
    for value in (0, 2.5):
        yield Sample("aten.where.ScalarOther", (mask(4, 6), a, value))
        yield Sample("aten.where.ScalarSelf", (mask(4, 6), value, b))
        yield Sample("aten.masked_fill.Scalar", (a, mask(6), value))
    yield Sample("aten.where.Scalar", (mask(4, 6), 1, 2))
    yield Sample("aten.masked_fill.Tensor", (a, mask(4, 1), f()))
    for op in ["dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout"]:
        yield Sample(f"aten.{op}", (a, 0.5, False))
        yield Sample(f"aten.{op}", (a, 0.5, True), random=True)
    yield Sample("aten.dropout", (a, 0.0, True))
    yield Sample("aten.native_dropout", (a, 0.5, False))
    for op in ["log_sigmoid", "hardswish", "relu6", "selu"]:
        yield Sample(f"aten.{op}", (a,))
    yield Sample("aten.floor_divide", (positive(4, 6), positive(4, 6)), constant=(0, 1))
    yield Sample("aten.prelu", (f(4, 6, 3), f(6)))
    yield Sample("aten.prelu", (f(4, 6, 3), f(1)))
    yield Sample("aten.prelu", (f(4), f()))
    for op in ["zeros_like", "ones_like"]:
        yield Sample(f"aten.{op}", (a,))
    yield Sample("aten.full_like", (a, 3.0))
    yield Sample("aten.fill.Scalar", (a, 3.0))
    yield Sample("aten.fill.Tensor", (a, f()))
    for op in ["__and__", "__or__", "__xor__"]:
        yield Sample(f"aten.{op}.Tensor", (mask(4, 6), mask(6)))
    for op in ["max.other", "min.other"]:
        yield Sample(f"aten.{op}", (a, f(6)))


POINTWISE = """abs acos asin atan ceil cos cosh deg2rad digamma elu erf erfc exp exp2 expm1 floor
frac gelu hardsigmoid hardtanh isfinite isinf isnan leaky_relu lgamma log log10 log1p log2
logical_not logit mish nan_to_num reciprocal relu round rsqrt sgn sigmoid sign silu sin sinc sinh
softplus sqrt square tan tanh trunc""".split()

BINARY = """atan2 eq.Tensor ge.Tensor gt.Tensor hypot le.Tensor logical_and logical_or logical_xor
lt.Tensor maximum minimum ne.Tensor pow.Tensor_Tensor remainder.Tensor fmod.Tensor
div.Tensor_mode""".split()


def pointwise() -> Iterator[Sample]:
    for op in POINTWISE:
        yield Sample(f"aten.{op}", (torch.rand(4, 6, generator=_generator).double() * 0.8 + 0.1,))
    for op in BINARY:
        mode = {"rounding_mode": "floor"} if op.endswith("_mode") else {}
        yield Sample(f"aten.{op}", (positive(4, 6), positive(4, 6)), mode)
        yield Sample(f"aten.{op}", (positive(4, 1), positive(7, 1, 6)), mode, n=BOTH)
    for op in ["bitwise_and.Tensor", "bitwise_or.Tensor", "bitwise_xor.Tensor"]:
        yield Sample(f"aten.{op}", (mask(4, 6), mask(6)))
    yield Sample("aten.bitwise_not", (mask(4, 6),))
    for op in ["eq", "ne", "lt", "le", "gt", "ge", "add", "sub", "rsub", "remainder"]:
        yield Sample(f"aten.{op}.Scalar", (f(4, 6), 0.5))
    yield Sample("aten.pow.Tensor_Scalar", (positive(4, 6), 3))
    yield Sample("aten.pow.Scalar", (2.0, f(4, 6)))
    yield Sample("aten.clamp", (f(4, 6), -0.5, 0.5))
    yield Sample("aten.clamp_min", (f(4, 6), 0.1))
    yield Sample("aten.clamp_max", (f(4, 6), 0.1))
    yield Sample("aten.clamp.Tensor", (f(4, 6), f(6) - 3, f(4, 1) + 3))
    yield Sample("aten.addcmul", (f(4, 6), f(6), f(4, 1)), {"value": 2})
    yield Sample("aten.addcdiv", (f(4, 6), f(6), positive(4, 1)))
    yield Sample("aten.lerp.Scalar", (f(4, 6), f(4, 6), 0.3))
    yield Sample("aten.lerp.Tensor", (f(4, 6), f(6), f(4, 1)))
    yield Sample("aten.gelu", (f(4, 6),), {"approximate": "tanh"})
    yield Sample("aten.threshold", (f(4, 6), 0.1, 2.0))


def views() -> Iterator[Sample]:
    for op in ["reshape", "view", "_unsafe_view", "view_copy"]:
        yield Sample(f"aten.{op}", (f(2, 4, 24), [2, 4, 4, 6]), n=BOTH)
        yield Sample(f"aten.{op}", (f(2, 4, 4, 6), [2, 4, -1]), n=BOTH)
        yield Sample(f"aten.{op}", (f(4, 6, 2), [24, 2]))
        yield Sample(f"aten.{op}", (f(4, 6), [6, 4]))
        yield Sample(f"aten.{op}", (f(7, 6), [7, 1, 3, 2]), n=BOTH)
        yield Sample(f"aten.{op}", (f(1, 8, 1, 6), [8, 6, 1]))
        yield Sample(f"aten.{op}", (f(4, 6), [24]))
    yield Sample("aten.reshape", (f(1, 1), []))
    yield Sample("aten.flatten", (f(2, 4, 6), 1, 2))
    yield Sample("aten.flatten", (f(4, 4, 6), 0, 1), n=BOTH)
    yield Sample("aten.unflatten", (f(4, 24), 1, [4, 6]), n=BOTH)
    yield Sample("aten.unflatten", (f(4, 24), -1, [4, -1]))
    yield Sample("aten.unsqueeze", (f(4, 7), 1), n=BOTH)
    yield Sample("aten.unsqueeze", (f(4, 7), -1))
    yield Sample("aten.squeeze", (f(4, 1, 2, 6),))
    yield Sample("aten.squeeze.dim", (f(4, 1, 2, 6), 1))
    yield Sample("aten.squeeze.dim", (f(4, 1, 2, 6), 2))
    yield Sample("aten.squeeze.dim", (f(7, 2), 0), n=(2, 3))
    yield Sample("aten.squeeze.dims", (f(4, 1, 2, 6), [1, -2]))
    yield Sample("aten.expand", (f(4, 1, 6), [4, 8, 6]), n=BOTH)
    yield Sample("aten.expand", (f(4, 1, 6), [7, -1, 8, -1]), n=BOTH)
    yield Sample("aten.transpose.int", (f(4, 6, 8), 1, -1), n=BOTH)
    for op in ["t", "numpy_T", "mT", "adjoint"]:
        yield Sample(f"aten.{op}", (f(4, 6),))
    yield Sample("aten.t", (f(4),))
    yield Sample("aten.permute", (f(4, 6, 8), [2, 0, -2]))
    yield Sample("aten.movedim.int", (f(4, 6, 8), 0, -1))
    yield Sample("aten.movedim.intlist", (f(4, 6, 8), [2, 0], [0, 1]))
    yield Sample("aten.select.int", (f(4, 6, 8), 1, 2))
    yield Sample("aten.unbind", (f(4, 3, 8), 1))
    yield Sample("aten.slice.Tensor", (f(4, 6, 8), 1, 1, 4))
    yield Sample("aten.slice.Tensor", (f(4, 6), 0, 0, 2**63 - 1))
    yield Sample("aten.slice.Tensor", (f(4, 6), 1, 0, 6))
    yield Sample("aten.slice.Tensor", (f(4, 6), 1, 0, 6, 2))
    yield Sample("aten.narrow", (f(4, 6), 1, 2, 3))
    yield Sample("aten.split.Tensor", (f(4, 6), 4, 1))
    yield Sample("aten.split.sizes", (f(4, 6), [2, 4], -1))
    yield Sample("aten.split_with_sizes", (f(4, 6), [2, 4], 1))
    yield Sample("aten.chunk", (f(4, 6), 3, -1))
    yield Sample("aten.unsafe_split.Tensor", (f(4, 6), 2, 1))
    yield Sample("aten.unsafe_split_with_sizes", (f(4, 6), [2, 4], 1))
    yield Sample("aten.unsafe_chunk", (f(4, 6), 3, -1))
    # fused dims, taken apart while they are sharded
    yield Sample("aten.chunk", (f(3, 16), 2, -1), n=BOTH)
    yield Sample("aten.split.Tensor", (f(2, 24, 3), 8, 1), n=BOTH)
    yield Sample("aten.split_with_sizes", (f(3, 16), [8, 4, 4], 1), n=BOTH)
    yield Sample("aten.split.sizes", (f(28), [12, 16]), n=BOTH)
    yield Sample("aten.tensor_split.indices", (f(3, 16), [4, 8], 1))
    yield Sample("aten.unflatten", (f(2, 36), -1, [3, 12]), n=BOTH)
    yield Sample("aten.view", (f(2, 36, 5), [2, 3, 4, 3, 5]), n=BOTH)
    for op in ("aten.view.dtype", "aten.view_copy.dtype"):
        yield Sample(op, (f(4, 6), torch.int32))
    yield Sample("aten.tensor_split.sections", (f(4, 6), 3, 1))
    yield Sample("aten.unfold", (f(4, 8), 1, 3, 2))
    yield Sample("aten.roll", (f(4, 6), [1], [1]))
    yield Sample("aten.roll", (f(4, 6), [1]))
    yield Sample("aten.flip", (f(4, 6), [1]))
    yield Sample("aten.diagonal", (f(4, 6, 6), 0, 1, 2))
    yield Sample("aten.tril", (f(4, 6, 6),))
    yield Sample("aten.triu", (f(4, 6, 6), 1))
    yield Sample("aten.repeat", (f(4, 6), [3, 1, 2]))
    yield Sample("aten.repeat", (f(1, 6), [2, 4, 1]))
    yield Sample("aten.tile", (f(4, 6), [2]))
    yield Sample("aten.repeat_interleave.self_int", (f(4, 6), 3, 0))
    yield Sample("aten.repeat_interleave.self_int", (f(4), 3))
    yield Sample("aten.constant_pad_nd", (f(4, 6, 8), [1, 2, 0, 0], 0.0))
    yield Sample("aten.constant_pad_nd", (f(4, 6), [1, 2], 3.0))
    yield Sample("aten.pad", (f(4, 6), [1, 2]))
    yield Sample("aten.pad", (f(2, 4, 6), [1, 2], "reflect"))
    yield Sample("aten.pad", (f(4, 6), [-1, 2], "constant", 2.0))
    for op in ["cat", "concat"]:
        yield Sample(f"aten.{op}", ([f(4, 6), f(4, 3)], -1), n=BOTH)
    yield Sample("aten.cat", ([f(4, 6), f(0)], 0))
    yield Sample("aten.stack", ([f(4, 6), f(4, 6)], 1), n=BOTH)
    yield Sample("aten.stack", ([f(4, 6), f(4, 6)], -1))


def reductions() -> Iterator[Sample]:
    x = f(4, 6, 7)
    for op in ["sum", "mean"]:
        dim = "dim_IntList" if op == "sum" else "dim"
        yield Sample(f"aten.{op}.default", (x,), n=BOTH)
        yield Sample(f"aten.{op}.{dim}", (x, [-1]), n=BOTH)
        yield Sample(f"aten.{op}.{dim}", (x, [0, 2], True), n=BOTH)
        yield Sample(f"aten.{op}.{dim}", (x, None))
    yield Sample("aten.sum.default", (mask(4, 6),))
    for op in ["amax", "amin", "logsumexp"]:
        yield Sample(f"aten.{op}", (x, [1]))
        yield Sample(f"aten.{op}", (x, [1, -1], True))
    for op in ["max.dim", "min.dim", "any.dim", "all.dim", "prod.dim_int", "median.dim"]:
        yield Sample(f"aten.{op}", (x, 1))
        yield Sample(f"aten.{op}", (x, 1, True))
    for op in ["any.dims", "all.dims"]:
        yield Sample(f"aten.{op}", (mask(4, 6, 7), [1, 2]))
    for op in ["argmax", "argmin"]:
        yield Sample(f"aten.{op}", (x, -1))
        yield Sample(f"aten.{op}", (x,))
    yield Sample("aten.linalg_vector_norm", (x, 2, [1]))
    yield Sample("aten.norm.ScalarOpt_dim", (x, 2, [1], True))
    for op in ["var.dim", "std.dim"]:
        yield Sample(f"aten.{op}", (x, [1]))
    for op in ["var.correction", "std.correction", "var_mean.correction"]:
        yield Sample(f"aten.{op}", (x, [1]), {"correction": 1, "keepdim": True})
    for op in ["cumsum", "cumprod", "logcumsumexp", "argsort"]:
        yield Sample(f"aten.{op}", (x, 1))
    yield Sample("aten.sort", (x, 1))
    yield Sample("aten.sort.stable", (x,), {"stable": True, "dim": 1})
    yield Sample("aten.argsort.stable", (x,), {"stable": True, "dim": 1})
    yield Sample("aten.topk", (x, 2, 1))
    yield Sample("aten.glu", (x, 1))
    yield Sample("aten.glu", (f(3, 16), -1), n=BOTH)
    for op in ["_softmax", "_log_softmax"]:
        yield Sample(f"aten.{op}", (x, -1, False))
    for op in ["softmax.int", "log_softmax.int"]:
        yield Sample(f"aten.{op}", (x, -1), n=BOTH)
        yield Sample(f"aten.{op}", (x.float(), 1, torch.float64))
        yield Sample(f"aten.{op}", (f(8), 0), n=BOTH)
    yield Sample("aten.one_hot", (ints(5, 4, 6), 5))
    yield Sample("aten.one_hot", (torch.arange(4), -1))


def indexing() -> Iterator[Sample]:
    ids = ints(10, 4, 6)
    yield Sample("aten.embedding", (f(10, 8), ids), n=BOTH)
    yield Sample("aten.embedding", (f(10, 8), ids, 3), n=BOTH)
    yield Sample("aten.embedding", (f(10, 8), ids, 9), n=BOTH)
    yield Sample("aten.embedding", (f(10, 8), ids, -1, True))
    yield Sample("aten.gather", (f(4, 6, 5), 1, ints(6, 4, 8, 5)), n=BOTH)
    yield Sample("aten.gather", (f(4, 6), -1, ints(6, 2, 3)))
    index = torch.stack([torch.randperm(6, generator=_generator)[:4] for _ in range(4)])
    yield Sample("aten.scatter.src", (f(4, 6), 1, index, f(4, 4)))
    yield Sample("aten.scatter.value", (f(4, 6), 1, index, 2.0))
    yield Sample("aten.scatter_add", (f(4, 6), 1, ints(6, 4, 8), f(4, 8)))
    yield Sample("aten.scatter_add", (f(6, 4), 0, ints(6, 3, 2), f(3, 2)))
    yield Sample("aten.index_select", (f(4, 6, 8), 1, ints(6, 4)))
    yield Sample("aten.index_add", (f(4, 6), 1, ints(6, 4), f(4, 4)), {"alpha": 2})
    yield Sample("aten.index_add", (f(6, 4), 0, ints(6, 8), f(8, 4)), n=BOTH)
    yield Sample("aten.index_copy", (f(2, 4, 6), 2, torch.tensor([1, 4]), f(2, 4, 2)))
    yield Sample("aten.select_scatter", (f(4, 6, 8), f(4, 8), 1, 2))
    yield Sample("aten.slice_scatter", (f(4, 6, 8), f(4, 2, 8), 1, 2, 4))
    yield Sample("aten.index.Tensor", (f(4, 6, 8), [ints(4, 6)]))
    yield Sample("aten.index.Tensor", (f(4, 6, 8), [None, ints(6, 5, 4)]), n=BOTH)
    yield Sample("aten.index.Tensor", (f(4, 6, 8), [ints(4, 4), None, ints(8, 4)]))
    yield Sample("aten.index.Tensor", (f(4, 6, 8), [None, ints(6, 4, 1), ints(8, 5)]))
    yield Sample("aten.index.Tensor", (f(4, 6), [mask(4)]))
    rows = torch.tensor([3, 0])
    yield Sample("aten.index_put", (f(4, 6), [rows], f(2, 6)))
    yield Sample("aten.index_put", (f(4, 6), [None, rows], f(4, 2)))
    yield Sample("aten.index_put", (f(4, 6, 8), [rows], f(8), True))
    yield Sample("aten.index_put", (f(4, 6, 8), [rows, None, rows], f(2, 6)))
    for op in ["new_zeros", "new_ones"]:
        yield Sample(f"aten.{op}", (f(4, 6), [4, 6, 2]))
    yield Sample("aten.new_full", (f(4, 6), [3, 6], 2.0))


def layers() -> Iterator[Sample]:
    q, k = f(2, 4, 6, 8), f(2, 4, 6, 8)
    sdpa = "aten.scaled_dot_product_attention"
    yield Sample(sdpa, (q, k, f(2, 4, 6, 8)), n=BOTH)
    yield Sample(sdpa, (q, k, f(2, 4, 6, 8), None, 0.0, True), n=BOTH)
    yield Sample(sdpa, (q, k, f(2, 4, 6, 8), f(1, 4, 6, 6)))
    yield Sample(sdpa, (q, k, f(2, 4, 6, 8), f(2, 1, 1, 6)))
    yield Sample(sdpa, (q, k, f(2, 4, 6, 8), f(6, 6)))
    yield Sample(sdpa, (q, f(2, 2, 5, 8), f(2, 2, 5, 8)), {"enable_gqa": True}, n=BOTH)
    yield Sample(sdpa, (q, f(2, 1, 5, 8), f(2, 1, 5, 8)), {"enable_gqa": True}, n=BOTH)
    yield Sample(sdpa, (f(1, 7, 4, 8), f(1, 7, 4, 8), f(1, 7, 4, 8)), n=BOTH)
    grouped = (f(2, 8, 6, 8), f(2, 2, 6, 8), f(2, 2, 6, 8), f(2, 8, 6, 6))
    yield Sample(sdpa, grouped, {"enable_gqa": True}, n=BOTH)
    yield Sample(sdpa, (q, k, f(2, 4, 6, 8), None, 0.5), random=True)
    masked = "autoshard.masked_attention"
    documents = torch.tensor([[0, 0, 1, 1, 1, 2], [0, 1, 1, 1, 1, 1]])[:, None, None]
    yield Sample(masked, (q, k, f(2, 4, 6, 8), documents, mask(2, 1, 1, 6), 3), n=BOTH)
    alike = (q, f(2, 2, 6, 8), f(2, 2, 6, 8), documents[:1], None, None)
    yield Sample(masked, alike, {"enable_gqa": True}, n=BOTH)
    yield Sample(masked, (q, f(2, 1, 6, 8), f(2, 1, 6, 8)), {"enable_gqa": True}, n=BOTH)
    x = f(4, 6, 8)
    yield Sample("aten.layer_norm", (x, [8], f(8), f(8)), n=BOTH)
    yield Sample("aten.layer_norm", (x, [6, 8]))
    yield Sample("aten.native_layer_norm", (x, [8], f(8), f(8), 1e-5))
    yield Sample("aten.rms_norm", (x, [8], f(8), 1e-6))
    yield Sample("aten._fused_rms_norm", (x, [8], f(8), 1e-6))
    image = f(4, 8, 5, 5)
    yield Sample("aten.group_norm", (image, 4, f(8), f(8)), n=BOTH)
    for training in (True, False):
        statistics = (f(8), f(8), f(8), positive(8), training, 0.1, 1e-5)
        yield Sample("aten.batch_norm", (image, *statistics, False), constant=(3, 4))
        functional = "aten._native_batch_norm_legit_functional"
        yield Sample(functional, (image, *statistics), constant=(3, 4))
        yield Sample("aten.instance_norm", (image, *statistics, False), constant=(3, 4))
    yield Sample("aten.batch_norm", (image, None, None, None, None, True, 0.1, 1e-5, False))
    yield Sample("aten.conv1d", (f(4, 6, 9), f(8, 6, 3), f(8), [2], [1]), n=BOTH)
    yield Sample("aten.conv1d", (f(6, 9), f(8, 6, 3), f(8)))
    yield Sample("aten.conv1d", (f(8, 9), f(8, 2, 3), f(8), [1], [0], [1], 4), n=BOTH)
    yield Sample("aten.conv1d.padding", (f(4, 6, 9), f(8, 6, 3), None, [1], "same"))
    yield Sample("aten.conv2d", (image, f(6, 8, 3, 3), f(6)), n=BOTH)
    yield Sample("aten.conv2d", (image, f(8, 1, 3, 3), f(8), [1], [1], [1], 8), n=BOTH)
    yield Sample("aten.conv2d", (f(8, 5, 5), f(6, 8, 3, 3), f(6)))
    yield Sample("aten.conv3d", (f(2, 4, 3, 3, 3), f(6, 4, 2, 2, 2), f(6)))
    yield Sample("aten.conv3d", (f(4, 3, 3, 3), f(6, 4, 2, 2, 2), f(6)))
    yield Sample("aten.conv_transpose1d", (f(4, 6, 5), f(6, 8, 3), f(8)))
    yield Sample("aten.conv_transpose1d", (f(4, 6, 5), f(6, 4, 3), f(8), [1], [0], [0], 2))
    yield Sample("aten.conv_transpose2d.input", (f(2, 6, 3, 3), f(6, 4, 2, 2), f(4)))
    yield Sample("aten.conv_transpose3d.input", (f(2, 4, 2, 2, 2), f(4, 2, 2, 2, 2), f(2)))
    for op, gates in [("lstm", 4), ("gru", 3), ("rnn_tanh", 1), ("rnn_relu", 1)]:
        rows = gates * 6
        params = [f(rows, 5), f(rows, 6), f(rows), f(rows)]
        for batch_first in (True, False):
            hidden = f(1, 4, 6)
            state = [hidden, f(1, 4, 6)] if op == "lstm" else hidden
            shape = (4, 3, 5) if batch_first else (3, 4, 5)
            flags = (True, 1, 0.0, True, False, batch_first)
            yield Sample(f"aten.{op}.input", (f(*shape), state, params, *flags))
    for k in (1, 2, 3):
        x = f(2, 4, *[4] * k)
        yield Sample(f"aten.max_pool{k}d", (x, [2] * k))
        yield Sample(f"aten.avg_pool{k}d", (x, [2] * k))
        yield Sample(f"aten.adaptive_avg_pool{k}d", (x, [2] * k))
        yield Sample(f"aten.upsample_nearest{k}d", (x, [8] * k))
        yield Sample(f"aten.upsample_nearest{k}d.vec", (x, None, [2.0] * k))
    yield Sample("aten.upsample_bilinear2d.vec", (f(2, 4, 4, 4), None, False, [2.0, 1.5]))
    yield Sample("aten.upsample_linear1d", (f(2, 4, 4), [8], False))
    yield Sample("aten.im2col", (f(2, 4, 4, 6), [3, 1], [1, 1], [1, 0], [1, 1]))
    yield Sample("aten.col2im", (f(2, 12, 24), [4, 6], [3, 1], [1, 1], [1, 0], [1, 1]))
    yield Sample("aten.upsample_bilinear2d", (f(2, 4, 4, 4), [8, 8], False))
    yield Sample("aten.upsample_bicubic2d", (f(2, 4, 4, 4), [8, 8], False))
    yield Sample("aten.upsample_trilinear3d.vec", (f(2, 4, 2, 2, 2), None, False, [2.0] * 3))
    for k in (1, 2, 3):
        yield Sample(f"aten._upsample_nearest_exact{k}d", (f(2, 4, *[4] * k), [8] * k))
    for kind in ("bilinear", "bicubic"):
        yield Sample(f"aten._upsample_{kind}2d_aa", (f(2, 4, 4, 4), [3, 3], False))
    for k in (2, 3):
        image, grid = f(2, 4, *[4] * k), f(2, *[4] * k, k).tanh()
        yield Sample("aten.grid_sampler", (image, grid, 0, 0, False))


def losses() -> Iterator[Sample]:
    target = ints(10, 8)
    ignored = target.clone()
    ignored[[1, 2, 7]] = -100
    for reduction in (0, 1, 2):
        for smoothing in (0.0, 0.1):
            for t, w in [(target, None), (ignored, None), (ignored, positive(10))]:
                args = (f(8, 10), t, w, reduction, -100, smoothing)
                yield Sample("aten.cross_entropy_loss", args, n=BOTH, constant=(2,))
        image = (f(2, 5, 4), ints(5, 2, 4), positive(5), reduction)
        yield Sample("aten.cross_entropy_loss", image, constant=(2,))
        for op in ["nll_loss", "nll_loss_nd"]:
            args = (f(8, 10), ignored, positive(10), reduction)
            yield Sample(f"aten.{op}", args, n=BOTH, constant=(2,))
        yield Sample("aten.nll_loss_nd", (f(2, 5, 4), ints(5, 2, 4), None, reduction))
        for op in ["mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"]:
            yield Sample(f"aten.{op}", (f(4, 6), f(4, 6), reduction))
    yield Sample("aten.cross_entropy_loss", (f(8, 10), target, None, 1, 3))
    yield Sample("aten.cross_entropy_loss", (f(10), ints(10), None, 1))
    yield Sample("aten.cross_entropy_loss", (f(8, 10), f(8, 10).softmax(-1)))
    yield Sample("aten.mse_loss", (f(4, 6), f(6)), constant=(1,))


def randomness() -> Iterator[Sample]:
    seed = torch.tensor(-(2**60) + 12345)
    x = f(4, 7, 8)
    for op in ["dropout", "native_dropout"]:
        yield Sample(f"autoshard.{op}", (x, seed, 0.4, 0), n=BOTH)
        yield Sample(f"autoshard.{op}", (x, seed, 1.0, 0))
    yield Sample("autoshard.feature_dropout", (f(4, 7, 3, 3), seed, 0.4, 1), n=BOTH)
    yield Sample("autoshard.bernoulli", (x.sigmoid(), seed, 2), n=BOTH, constant=(0,))
    yield Sample("autoshard.bernoulli_p", (x, seed, 0.3, 2), n=BOTH, constant=(0,))
    for op in ["uniform", "normal"]:
        yield Sample(f"autoshard.{op}", (x, seed, -1.0, 2.0, 3), n=BOTH, constant=(0,))
        drawn = (x, seed, 0.0, 1.0, 3, torch.bfloat16)
        yield Sample(f"autoshard.{op}", drawn, constant=(0,))
    yield Sample("autoshard.exponential", (x, seed, 2.0, 4), n=BOTH, constant=(0,))
    yield Sample("autoshard.integers", (x, seed, -3, 60, 5), n=BOTH, constant=(0,))
    for count, replacement in [(1, False), (3, False), (9, True)]:
        drawn = (positive(6, 8), seed, count, replacement, 6)
        yield Sample("autoshard.multinomial", drawn, n=BOTH, constant=(0,))
    yield Sample("autoshard.normal_around", (x, seed, 2.0, 7), n=BOTH, constant=(0,))
    yield Sample("autoshard.normal_scaled", (x, seed, 2.0, 7), n=BOTH, constant=(0,))
    yield Sample("autoshard.normal_each", (x, f(4, 7, 8), seed, 7), n=BOTH, constant=(0, 1))
    for op in ["log_normal", "cauchy"]:
        yield Sample(f"autoshard.{op}", (x, seed, 0.5, 2.0, 8), n=BOTH, constant=(0,))
    yield Sample("autoshard.geometric", (x, seed, 0.3, 9), n=BOTH, constant=(0,))
    yield Sample("autoshard.rrelu", (x, seed, 0.1, 0.3, 9), n=BOTH)
    q, k, v = f(2, 8, 6, 4), f(2, 8, 5, 4), f(2, 8, 5, 3)
    given = (0.3, False, None, False, 5)
    yield Sample("autoshard.attention", (q, k, v, None, seed, *given), n=BOTH)
    yield Sample("autoshard.attention", (q, k, v, f(2, 8, 6, 5), seed, *given), n=BOTH)
    yield Sample("autoshard.attention", (q, k, v, mask(2, 1, 6, 5), seed, *given), n=BOTH)
    yield Sample("autoshard.attention", (q, k, v, None, seed, 0.3, True, 0.7, False, 5))
    grouped = (q, k[:, :4], v[:, :4], None, seed, 0.3, True, None, True, 5)
    yield Sample("autoshard.attention", grouped, n=BOTH)


def mixtures() -> Iterator[Sample]:
    """Bodies as the matcher writes them, of experts stored in each form."""
    rows = "transformers.grouped_mm_fallback.default"
    product = '["{}",["{}","{}","%offs"],{{}}]'.format

    def body(*instructions: str) -> str:
        last = len(instructions) - 1
        ends = (
            '["aten.unsqueeze.default",["%weight",-1],{}]',
            f'["aten.mul.Tensor",["%{last}","%{last + 1}"],{{}}]',
        )
        return f"[{','.join((*instructions, *ends))}]"

    packed = body(
        product(rows, "%rows", "%s0"),
        '["aten.split.Tensor",["%0",4,-1],{}]',
        '["getitem",["%1",0],{}]',
        '["getitem",["%1",1],{}]',
        '["aten.silu.default",["%2"],{}]',
        '["aten.mul.Tensor",["%4","%3"],{}]',
        product(rows, "%5", "%s1"),
    )
    interleaved = body(
        product(rows, "%rows", "%s0"),
        '["aten.index.Tensor",["%s2",["%owner"]],{}]',
        '["aten.add.Tensor",["%0","%1"],{}]',
        '["aten.slice.Tensor",["%2",1,0,9223372036854775807,2],{}]',
        '["aten.slice.Tensor",["%2",1,1,9223372036854775807,2],{}]',
        '["aten.mul.Tensor",["%3","%4"],{}]',
        product(rows, "%5", "%s1"),
        '["aten.index.Tensor",["%s3",["%owner"]],{}]',
        '["aten.add.Tensor",["%6","%7"],{}]',
    )
    ids = torch.tensor([[0, 1], [3, 0], [0, 3], [1, 0], [3, 1], [0, 1], [1, 3], [0, 3]])
    routed = (f(8, 6), ids, f(8, 2))  # nobody chooses the third expert
    stacks = [f(4, 6, 8), f(4, 4, 6)]
    yield Sample("autoshard.experts", (*routed, stacks, packed), n=BOTH)
    biases = [f(4, 8), f(4, 6)]
    yield Sample("autoshard.experts", (*routed, [*stacks, *biases], interleaved), n=BOTH)
    alike = torch.zeros_like(ids)  # one expert gets everything
    yield Sample("autoshard.experts", (routed[0], alike, routed[2], stacks, packed), n=BOTH)
    uneven = [f(5, 6, 8), f(5, 4, 6)]
    yield Sample("autoshard.experts", (*routed, uneven, packed), n=(2, 3))


FAMILIES: list[Callable[[], Iterator[Sample]]] = [
    matrices,
    elementwise,
    pointwise,
    views,
    reductions,
    indexing,
    layers,
    losses,
    randomness,
    mixtures,
]


def all_samples() -> list[Any]:
    """Every sample, in a fixed order."""
    return [sample for family in FAMILIES for sample in family()]
