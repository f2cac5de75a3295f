"""The value behind a LazyGather: this rank's part, until somebody reads the whole."""

from __future__ import annotations

from collections.abc import Callable

import torch

from autoshard.runtime import compat
from autoshard.runtime.collectives import Axis, I, State, convert

_Take = Callable[[torch.Tensor], torch.Tensor]
OuterPart = tuple[State, Axis] | None


class PartOrWhole:
    """The local part or, once read, the whole; shared by the aliases of one LazyGather.

    dtype: of the whole; a part in a narrower one travels in that. outer: state and axis of what a
    gather over `axis` leaves, where that is a part on another axis still.
    """

    __slots__ = ("_again", "_local", "_whole", "axis", "dtype", "extent", "outer", "state")

    def __init__(
        self,
        local: torch.Tensor,
        state: State,
        axis: Axis,
        extent: int | None,
        dtype: torch.dtype | None = None,
        outer: OuterPart = None,
    ) -> None:
        self._local: torch.Tensor | None = local
        self.outer = outer
        self.state, self.axis, self.extent = state, axis, extent
        self.dtype = dtype or local.dtype
        self._whole: torch.Tensor | None = None
        self._again: torch.Tensor | None = None

    def like(self) -> torch.Tensor:
        """A tensor of the whole's dtype and device."""
        part = self.local if self._local is None else self._local
        return part if part.dtype == self.dtype else part.new_empty((), dtype=self.dtype)

    @property
    def gathered(self) -> bool:
        """Whether the whole is there."""
        return self._whole is not None

    def read(self) -> torch.Tensor:
        """The whole, which stays and takes the part's place."""
        if self._whole is None:
            assert self._local is not None
            whole = convert(self._local, self.state, I, self.axis, self.extent)
            if self.outer is not None:
                whole = convert(whole, self.outer[0], I, self.outer[1])
            whole = whole.to(self.dtype)
            self._whole = whole.contiguous()  # as the strides of the LazyGather say
            if not isinstance(self._local, compat.FakeTensor):  # whose layout Dynamo guards
                self._local = None  # what is changed in place from now on is the whole
        return self._whole

    def look(self) -> torch.Tensor:
        """The whole, for an operator that neither writes to it nor returns a view of it."""
        return self.read()

    @property
    def local(self) -> torch.Tensor:
        """This rank's part; a copy where the whole is there."""
        if self._local is not None:
            if self._local.dtype != self.dtype:
                self._local = self._local.to(self.dtype)
            return self._local
        whole = self.read()
        with torch.inference_mode(False), torch.no_grad():
            if self.outer is not None:
                whole = convert(whole, I, *self.outer)
            part = convert(whole, I, self.state, self.axis)
            if self._again is None:
                self._again = part.clone(memory_format=torch.contiguous_format)
            else:  # one tensor each time: Dynamo guards that two inputs are not the same
                self._again.copy_(part)
        return self._again


class ViewOfPart(PartOrWhole):
    """A view of another value: of its part until somebody needs the memory of the whole.

    take: makes the view of the whole.
    """

    __slots__ = ("of", "take")

    def __init__(self, of: PartOrWhole, take: _Take, part: torch.Tensor, state: State) -> None:
        super().__init__(part, state, of.axis, of.extent)
        self.of, self.take = of, take

    @property
    def gathered(self) -> bool:
        return self.of.gathered

    def read(self) -> torch.Tensor:
        whole = self.take(self.of.read())
        if not isinstance(self._local, compat.FakeTensor):
            self._local = None
        return whole

    def look(self) -> torch.Tensor:
        if self.gathered:
            return self.read()
        return convert(self.local, self.state, I, self.axis, self.extent).contiguous()

    @property
    def local(self) -> torch.Tensor:
        if self.gathered:
            self.read()
        return super().local
