"""A product of an activation and a weight in float8, as one operator and as a rank computes it.

    autoshard::float8_linear(x, weight, recipe)     x [..., k], weight [n, k] -> [..., n]

Each operand of a product is multiplied by a scale, the largest number of its float8 dtype over the
largest magnitude it has, and rounded; the product is divided by both scales. The recipes are those
of torchao's `Float8LinearConfig`: "float8" has one scale a tensor and gradients in e5m2;
"float8_rowwise" has one a row of each product, a power of two, and everything in e4m3. In backward
both products, of the gradient with the weight and with the activation, are of float8 too.

The operator is composite: AOTAutograd traces through it, and compilers fuse the casts. The product
is `_scaled_mm` on a GPU; elsewhere the float8 numbers are widened and multiplied, which gives the
same up to the order of a sum.

Where an axis splits a dim (m: rows of x, n: rows of the weight, k: what is summed over), the
largest magnitude of an operand over a split dim is a maximum over the ranks, so that scales are
exactly those of the whole tensors.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from autoshard.runtime import compat
from autoshard.runtime.collectives import Axis, all_reduce

TENSORWISE, ROWWISE = "float8", "float8_rowwise"
FLOAT8_RECIPES = (TENSORWISE, ROWWISE)
FLOAT8_MULTIPLE = 16
"""Kernels want every dim of a weight to be a multiple of this."""

# As in runtime/randomness/draws.py: count up when the operator gives other numbers.
_VERSION = "v1"
_E4M3, _E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
_SMALLEST = 1e-12  # of a magnitude, as torchao has it: a tensor of zeros has a finite scale
_BY_CUBLAS = (torch.bfloat16, torch.float16, torch.float32)


class _Matrix(NamedTuple):
    """A factor of a product, what is summed over being its last dim.

    dims: a letter for each dim. scale: [] or [rows, 1], where it is known.
    """

    tensor: torch.Tensor
    dims: str
    dtype: torch.dtype = _E4M3
    scale: torch.Tensor | None = None

    def turned(self) -> _Matrix:
        """The transposed matrix."""
        return self._replace(tensor=self.tensor.t(), dims=self.dims[::-1])


class _Scaling(NamedTuple):
    """The way to scale, and the dim ("m", "n", "k" or "") that an axis splits."""

    rowwise: bool
    split: str
    axis: Axis | None

    def scaled(self, *operands: _Matrix) -> list[_Matrix]:
        """The operands with their scales; one maximum over the ranks serves all that need it."""
        found: list[torch.Tensor] = []
        for one in operands:
            size = one.tensor.abs()
            amax = size.amax(-1, keepdim=True) if self.rowwise else size.amax()
            found.append(amax.float())
        if self.axis is not None:
            across = [i for i, one in enumerate(operands) if self._crosses(one)]
            if across:
                flat = torch.cat([found[i].reshape(-1) for i in across])
                lengths = [found[i].numel() for i in across]
                for i, part in zip(across, all_reduce(flat, "max", self.axis).split(lengths)):
                    found[i] = part.reshape(found[i].shape)
        return [one._replace(scale=self._scale(a, one.dtype)) for one, a in zip(operands, found)]

    def _crosses(self, one: _Matrix) -> bool:
        return one.dims[-1] == self.split if self.rowwise else self.split in one.dims

    def _scale(self, amax: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        # in float64, where eager and compiled code divide alike
        scale = (torch.finfo(dtype).max / amax.double().clamp(min=_SMALLEST)).float()
        return scale.log2().floor().exp2() if self.rowwise else scale

    def product(self, a: _Matrix, b: _Matrix, dtype: torch.dtype, fast: bool) -> torch.Tensor:
        """a @ b.T in `dtype`. fast: the GPU may sum in fewer bits, as torchao does in forward."""
        left, right = _rounded(a), _rounded(b)
        assert a.scale is not None and b.scale is not None
        by_a, by_b = a.scale.reciprocal(), b.scale.reciprocal()
        by_b = by_b.t().contiguous() if self.rowwise else by_b
        multiply = scaled_product if left.is_cuda else widened_product
        return multiply(left, right, by_a, by_b, dtype, fast)


def scaled_product(
    a: torch.Tensor,
    b: torch.Tensor,
    by_a: torch.Tensor,
    by_b: torch.Tensor,
    dtype: torch.dtype,
    fast: bool,
) -> torch.Tensor:
    """(a @ b.T) * by_a * by_b by torch's float8 kernel; by_a and by_b [] each, or a column and a
    row."""
    made = dtype if dtype in _BY_CUBLAS else torch.float32
    made = torch.bfloat16 if by_a.dim() else made  # the only dtype of that kernel
    scales = (by_a, by_b, None, None)
    return torch.ops.aten._scaled_mm.default(a, b.t(), *scales, made, fast).to(dtype)


def widened_product(
    a: torch.Tensor,
    b: torch.Tensor,
    by_a: torch.Tensor,
    by_b: torch.Tensor,
    dtype: torch.dtype,
    fast: bool,
) -> torch.Tensor:
    """The same in float32, or float64, for any device."""
    wide = torch.promote_types(dtype, torch.float32)
    return ((a.to(wide) @ b.to(wide).t()) * (by_a * by_b)).to(dtype)


def _rounded(one: _Matrix) -> torch.Tensor:
    assert one.scale is not None
    most = torch.finfo(one.dtype).max
    wide = one.tensor.to(torch.promote_types(one.tensor.dtype, torch.float32))
    return (wide * one.scale).clamp(-most, most).to(one.dtype).contiguous()


class _Float8Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        rowwise: bool,
        split: str,
        axis: Axis | None,
    ) -> torch.Tensor:
        way = _Scaling(rowwise, split, axis)
        rows = x.reshape(-1, x.shape[-1])
        a, b = way.scaled(_Matrix(rows, "mk"), _Matrix(weight, "nk"))
        # the scales of rows are other ones in backward, where other dims are summed over
        ctx.save_for_backward(x, weight, *(() if rowwise else (a.scale, b.scale)))
        ctx.way = way
        out = way.product(a, b, x.dtype, fast=True)
        return out.reshape(*x.shape[:-1], weight.shape[0])

    @staticmethod
    @once_differentiable  # autograd knows no derivative of the maxima over the ranks in it
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, *scales = ctx.saved_tensors
        way: _Scaling = ctx.way
        found = _whole_rows(grad.reshape(-1, grad.shape[-1]))
        g = _Matrix(found, "mn", _E4M3 if way.rowwise else _E5M2)
        a = _Matrix(_whole_rows(x.reshape(-1, x.shape[-1])), "mk")
        b = _Matrix(weight, "nk")
        if scales:
            (g,) = way.scaled(g)
            a, b = a._replace(scale=scales[0]), b._replace(scale=scales[1])
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            pair = [g, b.turned()]
            left, right = pair if scales else way.scaled(*pair)
            rows = x.numel() // x.shape[-1]
            grad_x = way.product(left, right, x.dtype, fast=False)[:rows].reshape(x.shape)
        if ctx.needs_input_grad[1]:
            pair = [g.turned(), a.turned()]
            left, right = pair if scales else way.scaled(*pair)
            grad_weight = way.product(left, right, weight.dtype, fast=False)
        return grad_x, grad_weight, None, None, None


def _whole_rows(matrix: torch.Tensor) -> torch.Tensor:
    """Rows of zeros after it, so that a kernel can sum over its rows."""
    short = -matrix.shape[0] % FLOAT8_MULTIPLE
    return F.pad(matrix, (0, 0, 0, short)) if short else matrix


def _whole(x: torch.Tensor, weight: torch.Tensor, recipe: str) -> torch.Tensor:
    out: torch.Tensor = _Float8Linear.apply(x, weight, recipe == ROWWISE, "", None)
    return out


def split_float8_linear(
    x: torch.Tensor, weight: torch.Tensor, recipe: str, *, split: str, axis: Axis
) -> torch.Tensor:
    """The operator where `axis` splits a dim: "m", rows of x; "n", rows of the weight, which are
    columns of the result; "k", what is summed over, the result being partial."""
    out: torch.Tensor = _Float8Linear.apply(x, weight, recipe == ROWWISE, split, axis)
    return out


FLOAT8_LINEAR = compat.define_operator(
    f"float8_linear.{_VERSION}(Tensor x, Tensor weight, str recipe) -> Tensor", _whole
)
