"""`Pending`: the gradients of one parameter that wait for the last microbatch."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from autoshard.runtime.parameters.data_unsharding import ACCUMULATE


class Pending:
    """The unreduced gradient of one parameter.

    It exists from the first accumulating forward to the end of the backward that reduces it, and
    as long as a graph that will write to it waits for its backward.
    """

    def __init__(self) -> None:
        self.sum: torch.Tensor | None = None
        self.dirty = False
        self._last: weakref.ref[torch.Tensor] | None = None

    def __reduce__(self) -> Any:
        return Pending, ()  # a copy of the model starts with none

    def take(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """The buffer; zeros where there is none."""
        if self.sum is None and self._last is not None:
            self.sum = self._last()
        if self.sum is None:
            self.sum = torch.zeros(tuple(shape), dtype=dtype, device=device)
            self._last = weakref.ref(self.sum)
        return self.sum

    def clear(self) -> None:
        """Forget the sum, also for graphs that wait for their backward."""
        if self.sum is not None:
            self.sum.zero_()
        self.sum, self.dirty = None, False

    def finished(self, buffer: torch.Tensor, microbatch: str) -> None:
        """Record that a backward has written to `buffer`."""
        self.dirty = microbatch == ACCUMULATE
        self.sum = buffer if self.dirty else None
