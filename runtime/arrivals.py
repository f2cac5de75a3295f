"""What goes from one graph to the next: outputs that come back, and those of one memory.

A graph writes to what it is given in the memory of its part or of the whole, and autograd has to
learn of it at the tensor that the caller holds.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, MutableSequence, Sequence
from typing import Any, NamedTuple

import torch

from autoshard.runtime import compat
from autoshard.runtime.collectives import I, State
from autoshard.runtime.lazy_gather import LazyGather
from autoshard.runtime.lazy_parts import PartOf


class Arrivals:
    """The inputs of a graph that come back from an earlier one, and enter as this rank's parts.

    states: by position; I: the graph takes the whole. written: positions that the graph writes to.
    """

    def __init__(self, states: Mapping[int, State], written: Collection[int]) -> None:
        self.parts = [i for i, state in states.items() if state != I]
        self.whole = [i for i, state in states.items() if state == I]
        self.written = [i for i in states if i in written]

    def take(self, values: MutableSequence[Any]) -> list[Taken]:
        """Replace each such input by what the graph takes; see `give_back`."""
        graded = [i for i in self.whole if values[i].requires_grad and i not in self.written]
        sources = {i: values[i] for i in (*self.written, *graded)}
        for i in self.whole:
            values[i] = values[i].full_tensor()
        for i in self.parts:
            values[i] = values[i]._value.local
        return [
            Taken(x, values[i], i not in self.whole, x.gathered, values[i].grad_fn)
            for i, x in sources.items()
        ]


class Taken(NamedTuple):
    """An input that a graph writes to or that has a gradient, and what the graph was given of it:
    its part or the whole. read: whether somebody has read the whole before. made_by: the autograd
    node of `given`."""

    source: LazyGather
    given: torch.Tensor
    is_part: bool
    read: bool
    made_by: Any


def give_back(taken: Sequence[Taken], outputs: Sequence[Any] = ()) -> tuple[Any, ...]:
    """Write parts that a graph has changed into wholes that somebody has read before; and what
    autograd has seen a graph write has the gradient of its new value. Returns the outputs, of which
    those that are views of an input's whole are views of the input."""
    made = list(outputs)
    for source, given, is_part, read, made_by in taken:
        value = source._value
        if is_part and read:
            value.read().copy_(value.part_of.gather(given.detach()))
        if given.grad_fn is not made_by:
            _Rewritten.apply(source, given, value.part_of if is_part else None)
        if is_part or given.stride() != source.stride():
            continue
        for i, out in enumerate(made):
            if type(out) is torch.Tensor and out.requires_grad and compat.same_storage(out, given):
                made[i] = source.as_strided(out.shape, out.stride(), out.storage_offset())
    return tuple(made)


def in_one_memory(outputs: Sequence[Any], pairs: Sequence[tuple[int, int]]) -> tuple[Any, ...]:
    """The outputs of a graph, of which those that are views are so for autograd, too: a write to
    one is seen by both. pairs: the positions of an output and of a view of it. What has no memory
    of the whole yet, a LazyGather, refuses to be written."""
    made = list(outputs)
    for of, at in pairs:
        whole, view = made[of], made[at]
        lazy = [one for one in (whole, view) if isinstance(one, LazyGather)]
        for one in lazy:
            one.in_one_memory = True
        if lazy or not view.requires_grad or view._base is whole:
            continue
        if compat.same_storage(whole, view):
            made[at] = whole.as_strided(view.shape, view.stride(), view.storage_offset())
    return tuple(made)


class _Rewritten(torch.autograd.Function):
    """`tensor` from here on has the gradient of `new`, which its memory holds already."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, tensor: LazyGather, new: torch.Tensor, part_of: PartOf | None
    ) -> LazyGather:
        ctx.part_of = part_of
        ctx.mark_dirty(tensor)
        return tensor

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor, None]:  # type: ignore[override]
        if isinstance(grad, LazyGather):
            grad = grad.full_tensor()
        return None, grad if ctx.part_of is None else ctx.part_of.cut_gradient(grad), None
