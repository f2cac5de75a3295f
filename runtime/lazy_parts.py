"""The value behind a LazyGather: this rank's part, until somebody reads the whole.

Operators work on a rank's part of a split tensor as on the whole, as happens to caches: a cache is
cropped, reordered, repeated and converted without a collective, as long as that leaves the dim
alone along which it is split. The likeliest token of logits that are split by words needs one
number and one index a rank, not the logits.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from autoshard.runtime import compat
from autoshard.runtime.collectives import (
    Axis,
    I,
    State,
    all_gather,
    chunk_bounds,
    convert,
    gradient_state,
    redistribute,
    shard_dim,
    whole_shape,
    with_dim,
)

aten = torch.ops.aten


class OnPart(NamedTuple):
    """The arguments after the first that an operator takes on a part, and the split dim of its
    result."""

    args: tuple[Any, ...]
    dim: int


COPIES = (
    aten.clone.default,
    aten._to_copy.default,
    aten.index_select.default,
    aten.index.Tensor,
)
"""Operators whose result has memory of its own."""

WHOLE_COPIES = (aten.clone.default, aten._to_copy.default)
"""Those of COPIES that leave out nothing: loops cast and copy all outputs, whichever they read."""

VIEWS = (
    aten.slice.Tensor,
    aten.select.int,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.expand.default,
    aten.view.default,
)
"""Operators whose result is a view."""

JOINS = (aten.cat.default, aten.stack.default)
"""Operators that copy several tensors into one."""

FILLS = (aten.zero_.default, aten.fill_.Scalar)
"""Operators that write the same number everywhere."""


def on_part(
    func: Any, shape: Sequence[int], dim: int, local: torch.Tensor, args: Sequence[Any]
) -> OnPart | None:
    """How one of COPIES or VIEWS works on a part; None where it needs the whole.

    shape: the whole's, which is split along `dim`. args: those after the tensor.
    """
    args, rank = tuple(args), len(shape)
    if func in (aten.clone.default, aten._to_copy.default):
        return OnPart(args, dim)
    if func in (aten.slice.Tensor, aten.index_select.default):
        along = (args[0] if args else 0) % rank
        return None if along == dim else OnPart(args, dim)
    if func is aten.select.int:
        along = args[0] % rank
        return None if along == dim else OnPart(args, dim - (along < dim))
    if func is aten.unsqueeze.default:
        return OnPart(args, dim + (args[0] % (rank + 1) <= dim))
    if func is aten.squeeze.dim:  # a split dim of two may be one of a part
        along = args[0] % rank
        return None if along == dim else OnPart(args, dim - (along < dim and shape[along] == 1))
    if func is aten.index.Tensor:
        return _indexed(dim, args)
    if func is aten.expand.default:
        if shape[dim] == 1:  # to be repeated along the split dim
            return None
        return _with_size(args, dim + len(args[0]) - rank, local.shape[dim])
    known = math.prod(size for size in args[0] if size != -1)
    sizes = [math.prod(shape) // known if size == -1 else size for size in args[0]]
    after = _dim_of_view(shape, dim, sizes)
    return None if after is None else _with_size((sizes,), after, local.shape[dim])


def split_dim_of_join(func: Any, rank: int, dim: int, along: int) -> int | None:
    """The split dim of what one of JOINS makes along another dim; None along the split dim itself.

    rank, dim: the number of dims of each tensor, and that along which it is split.
    """
    if func is aten.stack.default:
        return dim + (along % (rank + 1) <= dim)
    return None if along % rank == dim else dim


def _with_size(args: tuple[Any, ...], dim: int, size: int) -> OnPart:
    sizes = list(args[0])
    sizes[dim] = size
    return OnPart((sizes, *args[1:]), dim)


def _dim_of_view(shape: Sequence[int], dim: int, sizes: Sequence[int]) -> int | None:
    """The dim of a view that is `dim` of the whole, unsplit and joined to no other."""
    before = math.prod(shape[:dim])
    for after, size in enumerate(sizes):
        if size == shape[dim] and math.prod(sizes[:after]) == before:
            return after
    return None


def _indexed(dim: int, args: tuple[Any, ...]) -> OnPart | None:
    """Rows of one dim by their numbers; masks and several indices at once need the whole."""
    given = [(at, index) for at, index in enumerate(args[0]) if index is not None]
    if len(given) != 1:
        return None
    ((at, index),) = given
    if at == dim or index.dtype in (torch.bool, torch.uint8):
        return None
    return OnPart(args, dim + (index.dim() - 1) * (at < dim))


def argmax_of_parts(
    local: torch.Tensor, dim: int, keepdim: bool, axis: Axis, extent: int
) -> torch.Tensor:
    """torch.argmax along the split dim: each rank's greatest value and its place are gathered.

    Of equal values the first counts, as in torch. extent: of the dim in the whole.
    """
    place = local.argmax(dim, keepdim=True)
    value = local.gather(dim, place)
    # doubles hold every value of the narrower dtypes, and every place, exactly
    mine = torch.stack([value.double(), (place + chunk_bounds(extent, axis)[0]).double()])
    values, places = all_gather(mine, axis).unflatten(0, (axis.size, 2)).unbind(1)
    found = places.gather(0, values.argmax(0, keepdim=True))[0].long()
    return found if keepdim else found.squeeze(dim)


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
        shape = whole_shape(part.shape, self.state, self.axis, self.extent)
        return shape if self.outer is None else whole_shape(shape, *self.outer)

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


class FetchedWhole(PartOrWhole):
    """A whole that one rank of an axis makes, and that all get where they first read it, alike.

    shown: a tensor of its dtype and device. fetch: the whole; a collective over the axis. Copies
    that nobody has read get their values when it is fetched, before anybody can write to it.
    """

    __slots__ = ("__weakref__", "_copies", "_fetch", "shown")

    def __init__(self, shown: torch.Tensor, axis: Axis, fetch: Callable[[], torch.Tensor]) -> None:
        super().__init__(shown, PartOf(I, axis))
        self.shown = shown
        self._fetch: Callable[[], torch.Tensor] | None = fetch
        self._copies: weakref.WeakKeyDictionary[FetchedWhole, Callable[..., torch.Tensor]]
        self._copies = weakref.WeakKeyDictionary()

    def like(self) -> torch.Tensor:
        return self.shown

    def read(self) -> torch.Tensor:
        if self._whole is None:
            assert self._fetch is not None
            fetched = self._fetch()
            if self._whole is None:  # that of a copy comes with its source's
                self._give(fetched)
        assert self._whole is not None
        return self._whole

    @property
    def local(self) -> torch.Tensor:
        return self.read()

    def copied(self, func: Any, kwargs: dict[str, Any]) -> FetchedWhole:
        """What one of `WHOLE_COPIES` makes of it, fetched no sooner."""
        copy = FetchedWhole(func(self.shown, **kwargs), self.part_of.axis, self.read)
        self._copies[copy] = functools.partial(func, **kwargs)
        if self._whole is not None:
            self._give(self._whole)
        return copy

    def _give(self, whole: torch.Tensor) -> None:
        self._whole, self._fetch = whole.contiguous(), None
        for copy, func in self._copies.items():
            copy._give(func(self._whole))
        self._copies.clear()


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
