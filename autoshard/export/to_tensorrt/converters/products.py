"""Matrix products."""

from __future__ import annotations

import torch
from torch import fx

from autoshard.export.to_tensorrt.converters.network import Lowering, Tensor, converts
from autoshard.export.to_tensorrt.converters.pointwise import elementwise

aten = torch.ops.aten


def _product(low: Lowering, left: Tensor, right: Tensor, transposed: bool) -> Tensor:
    rank = max(len(left.shape), len(right.shape))
    none, turned = low.trt.MatrixOperation.NONE, low.trt.MatrixOperation.TRANSPOSE
    return low.out(
        "add_matrix_multiply",
        low.with_rank(left, rank),
        none,
        low.with_rank(right, rank),
        turned if transposed else none,
    )


@converts(aten.linear.default)
def linear(low: Lowering, node: fx.Node) -> Tensor:
    """x Wᵀ + b."""
    x, weight = low[node.args[0]], low[node.args[1]]
    if len(x.shape) < 2:
        raise low.error("is a linear layer of a vector; engines have it of a matrix or more")
    out = _product(low, x, weight, transposed=True)
    bias = node.args[2] if len(node.args) > 2 else node.kwargs.get("bias")
    if bias is None:
        return out
    return elementwise(low, out, low.with_rank(low[bias], len(out.shape)), "SUM")


@converts(aten.matmul.default)
def matmul(low: Lowering, node: fx.Node) -> Tensor:
    """A product of matrices, dims in front broadcast."""
    left, right = low[node.args[0]], low[node.args[1]]
    if min(len(left.shape), len(right.shape)) < 2:
        raise low.error("multiplies a vector; engines multiply matrices")
    return _product(low, left, right, transposed=False)


@converts(aten.addmm.default)
def addmm(low: Lowering, node: fx.Node) -> Tensor:
    """b + x W."""
    if any(node.kwargs.get(name, 1) != 1 for name in ("alpha", "beta")):
        raise low.error(f"scales its terms: {dict(node.kwargs)}")
    out = _product(low, low[node.args[1]], low[node.args[2]], transposed=False)
    return elementwise(low, out, low.with_rank(low[node.args[0]], len(out.shape)), "SUM")
