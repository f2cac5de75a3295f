"""Outputs that stay sharded until somebody reads them.

The logits a language model returns beside its loss are often never read; gathering them costs
more than any other collective of the step. They are returned as a LazyGather: a tensor of the
global shape that gathers at its first use.

Reading one is a collective: every rank of the axis must do it, or none. Its shape, dtype, device
and repr are free.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, MutableSequence, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from autoshard.runtime import compat
from autoshard.runtime.collectives import (
    Axis,
    I,
    P,
    State,
    convert,
    gradient_state,
    redistribute,
    shard_dim,
)

aten = torch.ops.aten


class _Value:
    """The local part or, once read, the whole; shared by the aliases of one LazyGather."""

    __slots__ = ("_local", "axis", "extent", "state", "whole")

    def __init__(self, local: torch.Tensor, state: State, axis: Axis, extent: int | None) -> None:
        self._local: torch.Tensor | None = local
        self.state, self.axis, self.extent = state, axis, extent
        self.whole: torch.Tensor | None = None

    def read(self) -> torch.Tensor:
        if self.whole is None:
            whole = convert(self.local, self.state, I, self.axis, self.extent)
            self.whole = whole.contiguous()  # as the strides of the LazyGather say
            if not isinstance(self.local, compat.FakeTensor):  # whose layout Dynamo guards
                self._local = None  # what is changed in place from now on is the whole
        return self.whole

    @property
    def local(self) -> torch.Tensor:
        if self._local is not None:
            return self._local
        return convert(self.read(), I, self.state, self.axis).clone(
            memory_format=torch.contiguous_format
        )


class LazyGather(torch.Tensor):
    """A tensor of global shape whose values are still S(d) or P on one axis.

    An ordinary differentiable tensor otherwise: any operator gathers it (once) and works on the
    whole; its gradient is the whole's, cut back to this rank's part.
    """

    _value: _Value

    @staticmethod
    def __new__(cls, value: _Value, shape: Sequence[int], requires_grad: bool) -> LazyGather:
        self: LazyGather = compat.wrapper_tensor(cls, tuple(shape), value.local, requires_grad)
        self._value = value
        return self

    @property
    def gathered(self) -> bool:
        """Whether the values have been read already, so that reading is free."""
        return self._value.whole is not None

    def state_on(self, axis: Axis) -> State:
        """The state of the values on an axis; I on another one than theirs."""
        return self._value.state if self._value.axis == axis else I

    def full_tensor(self) -> torch.Tensor:
        """The whole as a plain tensor, differentiable. A collective at the first use."""
        return _Read.apply(self)  # type: ignore[no-any-return]

    @classmethod
    @compat.not_traced  # between two graphs Dynamo would take this frame for the user's code
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is aten.detach.default:
            return LazyGather(args[0]._value, args[0].shape, False)
        if func in COPIES and (made := _copied(func, args, kwargs or {})) is not None:
            return made
        # An in-place operator changes the whole, which every later use reads; autograd returns
        # the LazyGather itself, whatever is returned here.
        args, kwargs = pytree.tree_map_only(LazyGather, _read, (args, kwargs or {}))
        return func(*args, **kwargs)

    # Attributes and methods that torch implements below its operators.

    def numpy(self, *, force: bool = False) -> Any:
        """As torch.Tensor.numpy; gathers."""
        return self.full_tensor().numpy(force=force)

    def tolist(self) -> Any:
        """As torch.Tensor.tolist; gathers."""
        return self.full_tensor().tolist()

    def data_ptr(self) -> int:
        """The address of the whole; gathers."""
        return _read(self).data_ptr()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.full_tensor().detach().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        return self.detach().clone().requires_grad_(self.requires_grad)

    def __repr__(self, *args: Any, **kwargs: Any) -> str:  # type: ignore[override]
        if self._value.whole is not None:
            return repr(self.full_tensor())
        value = self._value
        return (
            f"LazyGather(shape={tuple(self.shape)}, dtype={self.dtype}, {value.state} on "
            f"{value.axis.name}; call .full_tensor() on every rank for its values)"
        )

    # Dynamo compares the flattened form at different times: it must not depend on whether the
    # values have been read.

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        value = self._value
        return ["_local"], (value.state, value.axis, value.extent)

    @property
    def _local(self) -> torch.Tensor:
        return self._value.local

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], context: Any, shape: Any, stride: Any
    ) -> LazyGather:
        return LazyGather(_Value(inner["_local"], *context), shape, False)


class Arrivals:
    """The inputs of a graph that come back from an earlier one, and enter as this rank's parts.

    states: by position; I: the graph takes the whole. written: positions that the graph writes to.
    """

    def __init__(self, states: Mapping[int, State], written: Collection[int]) -> None:
        self.parts = [i for i, state in states.items() if state != I]
        self.whole = [i for i, state in states.items() if state == I]
        self.written = [i for i in self.parts if i in written]

    def take(self, values: MutableSequence[Any]) -> list[tuple[_Value, torch.Tensor]]:
        """Replace each such input by what the graph takes; see `give_back`."""
        for i in self.whole:
            values[i] = values[i].full_tensor()
        read = [(i, values[i]._value) for i in self.written if values[i].gathered]
        for i in self.parts:
            values[i] = values[i]._value.local
        return [(value, values[i]) for i, value in read]


def give_back(taken: Sequence[tuple[_Value, torch.Tensor]]) -> None:
    """Write parts that a graph has changed into wholes that somebody has read before."""
    for value, part in taken:
        value.read().copy_(convert(part, value.state, I, value.axis, value.extent))


def wrap_outputs(
    outputs: Sequence[Any], states: Sequence[State], extents: Sequence[int | None], axis: Axis
) -> tuple[Any, ...]:
    """Make each output in state S(d) or P a LazyGather; the others pass as they are.

    extents: the global size of the sharded dim where it is known (a static size); None: the axis
    divides it. An output in state R is replicated already, and must have been changed to I by the
    graph, which knows its gradient.
    """
    return tuple(
        lazy(output, state, axis, extent)
        if isinstance(output, torch.Tensor) and (state == P or shard_dim(state) is not None)
        else output
        for output, state, extent in zip(outputs, states, extents, strict=True)
    )


def lazy(local: torch.Tensor, state: State, axis: Axis, extent: int | None = None) -> torch.Tensor:
    """This rank's part in state S(d) or P as a LazyGather of the whole; differentiable."""
    if extent is not None and extent % axis.size == 0:
        extent = None
    if local.requires_grad and torch.is_grad_enabled():
        return _Wrap.apply(local, state, axis, extent)  # type: ignore[no-any-return]
    return _wrap(local, state, axis, extent)


def _wrap(local: torch.Tensor, state: State, axis: Axis, extent: int | None) -> LazyGather:
    shape = list(local.shape)
    dim = shard_dim(state)
    if dim is not None:
        shape[dim] = shape[dim] * axis.size if extent is None else extent
    return LazyGather(_Value(local.detach(), state, axis, extent), shape, False)


COPIES = (aten.clone.default, aten._to_copy.default, aten.index_select.default)
"""Operators whose result is no view, and which work on a shard as on the whole; `index_select` on
another dim than the sharded one. A cache is reordered, converted and copied as shards."""


def _copied(func: Any, args: Any, kwargs: Any) -> LazyGather | None:
    """The result of one of COPIES as a LazyGather; None where the whole is read instead."""
    source, *rest = args
    if not isinstance(source, LazyGather) or source.gathered:
        return None
    value = source._value
    dim = shard_dim(value.state)
    along = func is aten.index_select.default and rest[0] % source.dim() == dim
    if dim is None or along or any(isinstance(one, LazyGather) for one in rest):
        return None
    return _wrap(func(value.local, *rest, **kwargs), value.state, value.axis, value.extent)


def _read(tensor: LazyGather) -> torch.Tensor:
    return tensor._value.read()


class _Wrap(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, local: torch.Tensor, state: State, axis: Axis, extent: int | None
    ) -> LazyGather:
        ctx.state, ctx.axis = state, axis
        return _wrap(local, state, axis, extent)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        # whoever reads the whole does so on every rank alike: its gradient is replicated
        if isinstance(grad, LazyGather):
            grad = grad.full_tensor()
        grad = redistribute(grad, I, gradient_state(ctx.state), ctx.axis)
        return grad, None, None, None


class _Read(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: LazyGather) -> torch.Tensor:  # type: ignore[override]
        return _read(tensor).detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad
