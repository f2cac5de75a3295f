"""What a file is made of: tensors that are pieces of parameters, cut, turned and joined."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Piece:
    """A part of one parameter. rows: which of its outputs, None for all. columns: (start, length)
    of its inputs, None for all. The outputs are the last dim but one, or, where `transposed`, the
    last; the only dim of a vector. plus_one: add 1."""

    parameter: str
    rows: torch.Tensor | None = None
    columns: tuple[int, int] | None = None
    transposed: bool = False
    plus_one: bool = False

    def needs(self, shape: tuple[int, ...]) -> list[tuple[int, int]]:
        """For each dim of the parameter, the first index it needs and one past the last."""
        needed = [(0, size) for size in shape]
        outputs, inputs = self._dims(len(shape))
        if self.rows is not None:
            empty = self.rows.numel() == 0
            needed[outputs] = (0, 0) if empty else (int(self.rows.min()), int(self.rows.max()) + 1)
        if self.columns is not None:
            needed[inputs] = (self.columns[0], self.columns[0] + self.columns[1])
        return needed

    def take(
        self, tensor: torch.Tensor, starts: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        """The piece, from a part of the parameter that begins at index `starts`."""
        outputs, inputs = self._dims(tensor.dim())
        if self.rows is not None:
            rows = (self.rows - starts[outputs]).to(tensor.device)
            tensor = _select(tensor, outputs, rows)
        if self.columns is not None:
            tensor = tensor.narrow(inputs, self.columns[0] - starts[inputs], self.columns[1])
        if self.transposed and tensor.dim() > 1:
            tensor = tensor.transpose(-1, -2)
        if self.plus_one:
            tensor = tensor.float() + 1.0
        return tensor.to(dtype)

    def _dims(self, ndim: int) -> tuple[int, int]:
        if ndim == 1:
            return 0, 0
        return (ndim - 1, ndim - 2) if self.transposed else (ndim - 2, ndim - 1)


@dataclass(frozen=True)
class Entry:
    """One tensor of a file: its pieces one after the other along the first dim, then zeros."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[Piece, ...]


def _select(tensor: torch.Tensor, dim: int, rows: torch.Tensor) -> torch.Tensor:
    """Rows by number; a view where they are consecutive."""
    if rows.numel() == 0:
        return tensor.narrow(dim, 0, 0)
    first, last = int(rows[0]), int(rows[-1])
    if last - first + 1 == rows.numel() and bool((rows.diff() == 1).all()):
        return tensor.narrow(dim, first, rows.numel())
    return tensor.index_select(dim, rows)
