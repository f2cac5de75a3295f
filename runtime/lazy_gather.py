"""Outputs that stay sharded until somebody reads them.

The logits a language model returns beside its loss are often never read; gathering them costs
more than any other collective of the step. They are returned as a LazyGather: a tensor of the
global shape that gathers at its first use.

Reading one is a collective: every rank of the axis must do it, or none. Its shape, dtype, device
and repr are free, and so is what `lazy_parts` does on a part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from autoshard.runtime import compat
from autoshard.runtime.collectives import Axis, I, P, S, State, chunk_size, shard_dim
from autoshard.runtime.errors import AutoshardError
from autoshard.runtime.lazy_parts import (
    COPIES,
    FILLS,
    JOINS,
    VIEWS,
    WHOLE_COPIES,
    FetchedWhole,
    OnPart,
    OuterPart,
    PartOf,
    PartOrWhole,
    ViewOfPart,
    argmax_of_parts,
    on_part,
    split_dim_of_join,
)

aten = torch.ops.aten


class LazyGather(torch.Tensor):
    """A tensor of global shape whose values are still S(d) or P on one axis, or on two.

    An ordinary differentiable tensor otherwise: any operator gathers it (once) and works on the
    whole; its gradient is the whole's, cut back to this rank's part.
    """

    _value: PartOrWhole
    in_one_memory = False  # with another output of its graph

    @staticmethod
    def __new__(
        cls,
        value: PartOrWhole,
        shape: Sequence[int],
        requires_grad: bool,
        strides: Sequence[int] | None = None,
    ) -> LazyGather:
        self: LazyGather = compat.wrapper_tensor(
            cls, tuple(shape), value.like(), requires_grad, strides
        )
        self._value = value
        return self

    @property
    def gathered(self) -> bool:
        """Whether the values have been read already, so that reading is free."""
        return self._value.gathered

    def state_on(self, axis: Axis) -> State:
        """The state of the values on an axis; I on another one than theirs, and of parts on two
        axes, which no graph takes so."""
        place = self._value.part_of
        return place.state if place.axis == axis and place.outer is None else I

    @property
    def part(self) -> torch.Tensor:
        """This rank's part; a copy where the whole has been read."""
        return self._value.local

    @compat.never_a_frame
    def full_tensor(self) -> torch.Tensor:
        """The whole as a plain tensor, differentiable. A collective at the first use."""
        return _Read.apply(self)  # type: ignore[no-any-return]

    @classmethod
    @compat.not_traced  # between two graphs Dynamo would take this frame for the user's code
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is aten.detach.default:
            return LazyGather(args[0]._value, args[0].shape, False, args[0].stride())
        if func in ON_PARTS and (made := _on_part(func, args, kwargs)) is not None:
            return made
        # An in-place operator changes the whole, which every later use reads; autograd returns
        # the LazyGather itself, whatever is returned here.
        aliases = [one.alias_info for one in func._schema.arguments if one.alias_info is not None]
        if any(one.is_write for one in aliases) and getattr(args[0], "in_one_memory", False):
            raise AutoshardError(
                f"{func} writes to an output of a graph, of shape {tuple(args[0].shape)}, that is "
                "a view of another output of it, or has one, which would not see it",
                remedy="Write to a clone() of it, or make the view outside of the compiled model.",
            )
        read = _read if aliases else _look
        args, kwargs = pytree.tree_map_only(LazyGather, read, (args, kwargs))
        return func(*args, **kwargs)

    @compat.not_traced
    def __getitem__(self, index: Any) -> Any:
        """As torch.Tensor.__getitem__; without gradients no view to autograd, whose memory it is.

        Dynamo replays a view of a subclass from its base, with the bounds of a crop as symbols, and
        refuses the crop from behind, `cache[..., :-n, :]`, whose size is a sum of two of them.
        """
        found = super().__getitem__(index)
        is_real = isinstance(found, LazyGather) and not isinstance(
            found._value.like(), compat.FakeTensor
        )
        return found.detach() if is_real and not found.requires_grad else found

    # Attributes and methods that torch implements below its operators. Between two graphs Dynamo
    # would take their frames for the user's code, too.

    @compat.never_a_frame
    def numpy(self, *, force: bool = False) -> Any:
        """As torch.Tensor.numpy; gathers."""
        return self.full_tensor().numpy(force=force)

    @compat.never_a_frame
    def tolist(self) -> Any:
        """As torch.Tensor.tolist; gathers."""
        return self.full_tensor().tolist()

    @compat.never_a_frame
    def data_ptr(self) -> int:
        """The address of the whole; gathers."""
        return _read(self).data_ptr()

    @compat.never_a_frame
    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.full_tensor().detach().__reduce_ex__(protocol)

    @compat.never_a_frame
    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        return self.detach().clone().requires_grad_(self.requires_grad)

    @compat.never_a_frame
    def __repr__(self, *args: Any, **kwargs: Any) -> str:  # type: ignore[override]
        if self.gathered:
            return repr(self.full_tensor())
        state, axis, _, outer = self._value.part_of
        also = "" if outer is None else f", {outer[0]} on {outer[1].name}"
        return (
            f"LazyGather(shape={tuple(self.shape)}, dtype={self.dtype}, {state} on "
            f"{axis.name}{also}; call .full_tensor() on every rank for its values)"
        )

    # Dynamo compares the flattened form at different times: it must not depend on whether the
    # values have been read.

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["_local"], self._value.part_of

    @property
    def _local(self) -> torch.Tensor:
        return self._value.local

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], context: Any, shape: Any, stride: Any
    ) -> LazyGather:
        return LazyGather(PartOrWhole(inner["_local"], context), shape, False, stride)


def wrap_outputs(
    outputs: Sequence[Any],
    states: Sequence[State],
    extents: Sequence[int | None],
    axis: Axis,
    outer: Sequence[OuterPart] = (),
) -> tuple[Any, ...]:
    """Make each output in state S(d) or P a LazyGather; the others pass as they are.

    extents: the global size of the sharded dim where it is known (a static size); None: the axis
    divides it. outer: of each output, its state on an outer axis, which divides what it splits. An
    output in state R is replicated already, and must have been changed to I by the graph, which
    knows its gradient.
    """
    return tuple(
        _presented(output, state, axis, extent, on)
        for output, state, extent, on in zip(
            outputs, states, extents, outer or [None] * len(states), strict=True
        )
    )


def _presented(output: Any, state: State, axis: Axis, extent: int | None, outer: OuterPart) -> Any:
    if not isinstance(output, torch.Tensor):
        return output
    if state == P or shard_dim(state) is not None:
        return lazy(output, state, axis, extent, outer)
    return output if outer is None else lazy(output, *outer)


def lazy(
    local: torch.Tensor,
    state: State,
    axis: Axis,
    extent: int | None = None,
    outer: OuterPart = None,
) -> torch.Tensor:
    """This rank's part in state S(d) or P as a LazyGather of the whole; differentiable."""
    if extent is not None and extent % axis.size == 0:
        extent = None
    part_of = PartOf(state, axis, extent, outer)
    if local.requires_grad and torch.is_grad_enabled():
        return _Wrap.apply(local, part_of)  # type: ignore[no-any-return]
    return _wrap(local, part_of)


def _wrap(local: torch.Tensor, part_of: PartOf, dtype: torch.dtype | None = None) -> LazyGather:
    if part_of.extent is not None:  # of a part of one row or none strides say nothing: ranks would
        local = local.contiguous()  # decide unlike what a view is of
    return LazyGather(PartOrWhole(local.detach(), part_of, dtype), part_of.shape(local), False)


ON_PARTS = (*COPIES, *VIEWS, *JOINS, *FILLS, aten.argmax.default)
"""Operators that may do without the whole: a cache is cropped, reordered, converted, copied, cut
into rows, joined of rows and cleared as shards."""


def _on_part(func: Any, args: Any, kwargs: Any) -> Any:
    """The result of one of ON_PARTS, made of this rank's part; None where the whole is read."""
    source, *rest = args
    if func in JOINS:
        return _joined(func, source, *rest, **kwargs)
    if not isinstance(source, LazyGather) or source.gathered:
        return None
    if any(isinstance(one, LazyGather) for one in pytree.tree_leaves(rest)):
        return None
    value, dim = source._value, source._value.part_of.dim
    device = kwargs.get("device")
    if device is not None and torch.device(device).type != source.device.type:
        return None  # where it goes there may be no collectives
    if isinstance(value, FetchedWhole) and func in WHOLE_COPIES:
        return LazyGather(value.copied(func, kwargs), source.shape, False)
    if dim is None:
        return None
    if func in FILLS:
        func(value.local, *rest)
        return source
    if func is aten.argmax.default:
        return _argmax(source, *rest, **kwargs)
    found = on_part(func, source.shape, dim, value.local, rest)
    if found is None:
        return None
    if func is aten.view.default and not (source.is_contiguous() and value.local.is_contiguous()):
        return None
    if func in VIEWS:
        return _view(source, func, rest, found)
    part, whole = value.local, kwargs.get("dtype") or source.dtype
    if func is aten._to_copy.default and part.dtype.itemsize < whole.itemsize:
        kwargs = {**kwargs, "dtype": part.dtype}  # it is gathered in fewer bytes
    local = func(part, *found.args, **kwargs)
    return _wrap(local, value.part_of.along(found.dim), whole)


def _view(source: LazyGather, func: Any, args: Sequence[Any], found: OnPart) -> LazyGather:
    value, part = source._value, func(source._value.local, *found.args)
    view = ViewOfPart(value, lambda whole: func(whole, *args), part, found.dim)
    shown = torch.empty_strided(source.shape, source.stride(), device="meta", dtype=source.dtype)
    shown = func(shown, *args)
    return LazyGather(view, shown.shape, False, shown.stride())


def _joined(func: Any, tensors: Sequence[torch.Tensor], dim: int = 0) -> LazyGather | None:
    """Tensors that are split alike in one; an empty cache is a tensor of one dim without numbers,
    which `cat` passes over."""
    joined = [one for one in tensors if func is aten.stack.default or one.shape != (0,)]
    values = [one._value for one in joined if isinstance(one, LazyGather) and not one.gathered]
    if not values or len(values) < len(joined) or len({one.dtype for one in tensors}) > 1:
        return None
    part_of = values[0].part_of
    if part_of.dim is None or any(one.part_of != part_of for one in values):
        return None
    after = split_dim_of_join(func, joined[0].dim(), part_of.dim, dim)
    if after is None:
        return None
    return _wrap(func([one.local for one in values], dim), part_of.along(after))


def _argmax(source: LazyGather, dim: int | None = None, keepdim: bool = False) -> Any:
    value = source._value
    state, axis, *_ = value.part_of
    if dim is None or state != S(dim % source.dim()):  # in another order, its places are others
        return None
    dim %= source.dim()
    rows = source.shape[dim]
    if not source.is_floating_point() or chunk_size(rows, axis.size) * (axis.size - 1) >= rows:
        return None  # a rank without rows has no greatest
    return argmax_of_parts(value.local, dim, keepdim, axis, rows)


def _read(tensor: LazyGather) -> torch.Tensor:
    return tensor._value.read()


def _look(tensor: LazyGather) -> torch.Tensor:
    return tensor._value.look()


class _Wrap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, part_of: PartOf) -> LazyGather:  # type: ignore[override]
        ctx.part_of = part_of
        return _wrap(local, part_of)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        # whoever reads the whole does so on every rank alike: its gradient is replicated
        if isinstance(grad, LazyGather):
            grad = grad.full_tensor()
        return ctx.part_of.cut_gradient(grad), None


class _Read(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: LazyGather) -> torch.Tensor:  # type: ignore[override]
        return _read(tensor).detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad
