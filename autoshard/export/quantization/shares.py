"""A quantized checkpoint in shares: what each of several processes computes of it, from the values
that it needs for that, so that it can go to a running server without a file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn

from autoshard.export.published_form import (
    CheckpointPart,
    in_published_form,
    published_parts,
    state_tensors,
)
from autoshard.export.quantization.layouts import BLOCK
from autoshard.export.quantization.quantizer import Quantizer
from autoshard.export.spec import weight_dtype


class Share(NamedTuple):
    """A part of a checkpoint that one process computes. rows: of its one matrix; None: all of
    it."""

    part: CheckpointPart
    rows: tuple[int, int] | None


class WrittenRows(NamedTuple):
    """Of a tensor of the directory, of `shape`, the rows from `first` on."""

    name: str
    values: torch.Tensor
    shape: tuple[int, ...]
    first: int


class QuantizedModel:
    """A model as `autoshard.export.huggingface(model, ..., quantize=kind, dtype=dtype)` writes it,
    for `autoshard.weights.send`: names, numbers and scales are those of that directory.

        autoshard.weights.send(autoshard.export.QuantizedModel(model, "fp8", dtype="bfloat16"))

    A scale is of whole rows or blocks of a matrix: each process that sends takes a share of the
    rows of every matrix, of which it lacks little where they are stored by rows, and quantizes it;
    what is published in another form is computed whole by one of them. Raises ExportError as the
    export does.
    """

    def __init__(
        self, model: nn.Module, kind: str, *, dtype: str | torch.dtype | None = None
    ) -> None:
        self.model = model
        chosen = None if dtype is None else weight_dtype(dtype)
        self.form = f"{kind} of {chosen or 'its own dtypes'}"
        parts = published_parts(model, state_tensors(model, chosen))
        self._quantizer = Quantizer(model, parts, kind, None)
        self._written = {n: d[0] for part in self._quantizer.parts for n, d in part.written.items()}
        self._parts = [(part, self._as_stored(part), self._quantizes(part)) for part in parts]

    @property
    def kept(self) -> list[str]:
        """The tensors that the directory has as they are stored."""
        return [p.sources[0].name for p, stored, changed in self._parts if stored and not changed]

    def shares(self, count: int) -> list[list[Share]]:
        """What each of `count` processes computes."""
        found: list[list[Share]] = [[] for _ in range(count)]
        load = [0] * count
        for part, stored, changed in self._parts:
            if stored and changed:
                rows = part.sources[0].value.shape[0]
                blocks = -(-rows // BLOCK)
                for i, own in enumerate(found):
                    low, high = (min(rows, blocks * j // count * BLOCK) for j in (i, i + 1))
                    if low < high:
                        own.append(Share(part, (low, high)))
            elif changed or not stored:
                least = load.index(min(load))
                found[least].append(Share(part, None))
                load[least] += sum(one.value.numel() for one in part.sources)
        return found

    def written(self, share: Share, tensors: dict[str, torch.Tensor]) -> Iterator[WrittenRows]:
        """A share's tensors of the directory. tensors: its rows of the sources, by name."""
        whole = share.part.sources[0].value.shape
        for name, made in self._quantizer.tensors(share.part, tensors).items():
            shape, first = self._written[name], 0
            if share.rows is not None and made.dim() < 2:
                made = made.new_tensor(whole)  # a layout says the matrix's shape beside its numbers
            elif share.rows is not None:
                first = share.rows[0] // (1 if shape[0] == whole[0] else BLOCK)
            yield WrittenRows(name, made, shape, first)

    def _as_stored(self, part: CheckpointPart) -> bool:
        """Whether a part is one tensor that is published by its own name, as it is."""
        if len(part.sources) > 1:
            return False
        one = part.sources[0]
        empty = torch.empty(one.value.shape, dtype=one.dtype, device="meta")
        return in_published_form(self.model, part, {one.name: empty}).get(one.name) is empty

    def _quantizes(self, part: CheckpointPart) -> bool:
        return not self._quantizer.names.isdisjoint(part.written)
