"""The value behind a LazyGather: this rank's part, until somebody reads the whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from autoshard.runtime import compat
from autoshard.runtime.collectives import (
    Axis,
    I,
    State,
    convert,
    gradient_state,
    redistribute,
    shard_dim,
    with_dim,
)

_Take = Callable[[torch.Tensor], torch.Tensor]
OuterPart = tuple[State, Axis] | None


class PartOf(NamedTuple):
    """What a rank's tensor is of the whole: all that is known of where its values belong.

    state: S(d), Z(d) or P, on `axis`. extent: of the split dim of the whole where `axis` does not
    divide it. outer: state and axis of what a gather over `axis` leaves, where that is a part on
    another axis still, which divides what it splits.
    """

    state: State
    axis: Axis
    extent: int | None = None
    outer: OuterPart = None

    @property
    def dim(self) -> int | None:
        """The one dim along which it is split; None of an addend, and of a part on two axes."""
        return shard_dim(self.state) if self.outer is None else None

    def along(self, dim: int) -> PartOf:
        """The same rows, in the same order, of another dim: of the result of an operator that does
        not look at where a row stands."""
        return self._replace(state=with_dim(self.state, dim))

    def shape(self, part: torch.Tensor) -> list[Any]:
        """The shape of the whole."""
        shape: list[Any] = list(part.shape)
        dim = shard_dim(self.state)
        if dim is not None:
            shape[dim] = shape[dim] * self.axis.size if self.extent is None else self.extent
        if self.outer is not None and (dim := shard_dim(self.outer[0])) is not None:
            shape[dim] *= self.outer[1].size
        return shape

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """The whole of every rank's part."""
        whole = convert(part, self.state, I, self.axis, self.extent)
        return whole if self.outer is None else convert(whole, self.outer[0], I, self.outer[1])

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of the whole."""
        if self.outer is not None:
            whole = convert(whole, I, *self.outer)
        return convert(whole, I, self.state, self.axis)

    def cut_gradient(self, grad: torch.Tensor) -> torch.Tensor:
        """The part's gradient of the whole's, which every rank has alike; differentiable."""
        if self.outer is not None:
            grad = redistribute(grad, I, gradient_state(self.outer[0]), self.outer[1])
        return redistribute(grad, I, gradient_state(self.state), self.axis)


class PartOrWhole:
    """The local part or, once read, the whole; shared by the aliases of one LazyGather.

    dtype: of the whole; a part in a narrower one travels in that.
    """

    __slots__ = ("_again", "_local", "_whole", "dtype", "part_of")

    def __init__(
        self, local: torch.Tensor, part_of: PartOf, dtype: torch.dtype | None = None
    ) -> None:
        self._local: torch.Tensor | None = local
        self.part_of = part_of
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
            whole = self.part_of.gather(self._local).to(self.dtype)
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
            part = self.part_of.cut(whole)
            if self._again is None:
                self._again = part.clone(memory_format=torch.contiguous_format)
            else:  # one tensor each time: Dynamo guards that two inputs are not the same
                self._again.copy_(part)
        return self._again


class ViewOfPart(PartOrWhole):
    """A view of another value: of its part until somebody needs the memory of the whole.

    take: makes the view of the whole. dim: along which the view is split.
    """

    __slots__ = ("of", "take")

    def __init__(self, of: PartOrWhole, take: _Take, part: torch.Tensor, dim: int) -> None:
        super().__init__(part, of.part_of.along(dim))
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
        return self.part_of.gather(self.local).contiguous()

    @property
    def local(self) -> torch.Tensor:
        if self.gathered:
            self.read()
        return super().local
