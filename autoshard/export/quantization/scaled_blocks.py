"""A quantized weight as numbers and a scale for each block of them: what an engine holds.

    weight 256 x 512     int8             scales of outputs   values int8 [256, 512], scale [256, 1]
                         fp8              128 x 128           values e4m3 [256, 512], scale [2, 4]
    its rows 64 to 128   fp8              64 x 128            values e4m3 [64, 512],  scale [1, 4]

A part is cut from the quantized whole, so that all ranks together hold what the Hugging Face
directory of that layout does; where a cut goes through blocks they become smaller ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from autoshard.export.quantization.layouts import WeightLayout, layout


@dataclass(frozen=True)
class BlockScaled:
    """values: as the weight, [..., rows, columns]. scale: [..., rows / r, columns / c] for blocks
    of r x c, the last of which may be smaller.
    """

    values: torch.Tensor
    scale: torch.Tensor
    block: tuple[int, int]

    def part(self, dim: int, start: int, length: int) -> BlockScaled:
        """`length` entries of one dim."""
        rank = self.values.dim()
        values = self.values.narrow(dim, start, length)
        if dim < rank - 2:
            return BlockScaled(values, self.scale.narrow(dim, start, length), self.block)
        finer = self._finer(dim, length)
        size = finer.block[dim - rank + 2]
        first, count = start // size, -(-length // size)
        return BlockScaled(values, finer.scale.narrow(dim, first, count), finer.block)

    def _finer(self, dim: int, length: int) -> BlockScaled:
        """The same in blocks that parts of `length` do not cut."""
        rank, rows_or_columns = self.values.dim(), dim - self.values.dim() + 2
        old = self.block[rows_or_columns]
        new = math.gcd(old, length)
        whole = -(-self.values.shape[dim] // new)
        scale = self.scale.repeat_interleave(old // new, dim).narrow(dim, 0, whole)
        block = (new, self.block[1]) if dim == rank - 2 else (self.block[0], new)
        return BlockScaled(self.values, scale, block)

    @property
    def matrix(self) -> BlockScaled:
        """In two dims: the rows of all matrices, one behind the other."""
        found = self
        if self.values.dim() > 2 and self.values.shape[-2] % self.block[0]:
            found = self._finer(self.values.dim() - 2, self.values.shape[-2])
        values, scale = (x.flatten(0, -2).contiguous() for x in (found.values, found.scale))
        return BlockScaled(values, scale, found.block)


def block_scaled(kind: str, weight: torch.Tensor, rows: int) -> BlockScaled:
    """A weight [..., columns] in the layout `kind`, each matrix of `rows` rows by itself, as it is
    published. On the meta device too."""
    how = layout(kind)
    matrices = weight.reshape(-1, rows, weight.shape[-1])
    made = [_of_matrix(how, matrix) for matrix in matrices]
    block = made[0].block
    if len(made) > 1 and rows % block[0]:
        made = [one._finer(0, rows) for one in made]
        block = made[0].block
    values = torch.cat([one.values for one in made]).reshape(weight.shape)
    scale = torch.cat([one.scale for one in made])
    if weight.dim() > 2:
        shape: Sequence[int] = weight.shape[:-2]
        scale = scale.reshape(*shape, -1, scale.shape[-1])
    return BlockScaled(values, scale, block)


def _of_matrix(how: WeightLayout, matrix: torch.Tensor) -> BlockScaled:
    values, scale = how.numbers(how.quantized(matrix), matrix.shape)
    block = how.block(matrix.shape)
    return BlockScaled(values, scale, block)
