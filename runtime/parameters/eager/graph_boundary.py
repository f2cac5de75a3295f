"""What graphs are given by eager code and by earlier graphs, and what they hand to both.

A graph takes inputs that eager code made of stored tensors as plain wholes: AOTAutograd traces
plain tensors, and its run time refuses any other class.

    for i in chosen.nonzero():           # breaks the graph: this frame is eager code
        w = self.weight.view(n, f, h)[i]     # a WholeView; `self.weight * 2` is a StoredTensor
        y = self.expert(x, w)                # a frame of its own, whose input `w` is

Where `f(self.weight)` leaves the graph (`f` is disabled, or breaks it), `f` gets the value that the
graph has of the weight, which is a gathered copy unless the rank holds the whole: a write to it
would be lost. The copies of a graph are kept until the next graph runs, which finds the writes.

What an earlier graph returned (a LazyGather) enters as this rank's part or as the whole. A graph
writes to what it is given in that memory, and autograd has to learn of it at the tensor that the
caller holds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, MutableSequence, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from autoshard.runtime import compat
from autoshard.runtime.collectives import I, State
from autoshard.runtime.errors import AutoshardError
from autoshard.runtime.lazy_gather import LazyGather
from autoshard.runtime.lazy_parts import PartOf
from autoshard.runtime.parameters.eager.gathering import unsharded
from autoshard.runtime.parameters.eager.stored_tensor import StoredTensor
from autoshard.runtime.parameters.eager.whole_views import Source, WholeView, marked


def is_eager_value(x: Any) -> bool:
    """Whether `x` is a view of a stored tensor, or a stored tensor that is no parameter."""
    return type(x) is WholeView or (isinstance(x, StoredTensor) and not isinstance(x, nn.Parameter))


class EagerValues:
    """Those inputs of a graph, which `take` replaces by plain tensors.

    inputs: those of the trace; Dynamo guards the class of each. written: positions that the graph
    writes to. Not seen by a count of writes, which AOTAutograd's own writes leave as it was.
    """

    def __init__(self, inputs: Sequence[Any], written: Collection[int]) -> None:
        self.positions = [i for i, x in enumerate(inputs) if is_eager_value(x)]
        self.written = [i for i in self.positions if i in written]

    def take(self, values: MutableSequence[Any]) -> dict[int, Source]:
        """Replace each by its plain whole; what they are of, for `give_back`."""
        sources = {}
        for i in self.positions:
            x = values[i]
            if type(x) is not WholeView:
                sources[i] = Source(x, unsharded(x))
                values[i] = sources[i].whole
                continue
            sources[i] = x._source
            x._source.refresh()
            with compat.plain_attributes():
                values[i] = x.as_subclass(torch.Tensor)
        return sources

    def give_back(self, sources: dict[int, Source], outputs: Any) -> Any:
        """Store what the graph has written. Returns its results, of which those that share the
        memory of such an input are WholeViews, as they are in eager code."""
        for i in self.written:
            sources[i].store()
        for source in sources.values():
            outputs = marked(outputs, source)
        return outputs


_PLAIN = (torch.Tensor, nn.Parameter)
_kept: list[tuple[torch.Tensor, int, str]] = []


def keep_copies(outputs: Sequence[Any], parameters: Mapping[int, tuple[str, Any]]) -> None:
    """parameters: name and stored tensor of each output that is a parameter as it was read, or a
    view of it."""
    for position, (name, stored) in parameters.items():
        copy = outputs[position]
        if copy.is_inference():  # counts no writes
            continue
        own = compat.local_of(stored).untyped_storage().data_ptr()
        # a part that is gathered when it is read (a subclass) has no storage of the whole
        if type(copy) not in _PLAIN or copy.untyped_storage().data_ptr() != own:
            _kept.append((copy, compat.writes_to(copy), name))


def check_copies() -> None:
    """Raise AutoshardError where a copy was written to since it was handed out."""
    if not _kept:
        return
    written = [name for copy, writes, name in _kept if compat.writes_to(copy) != writes]
    _kept.clear()
    if written:
        raise AutoshardError(
            f"code outside of the graph wrote to {', '.join(written)}, which the graph had "
            "handed to it as a gathered copy: the parameter has not changed",
            remedy="Hand the module over and write to its parameter there "
            "(f(module) and module.weight in place of f(self.weight)).",
        )


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


def in_one_memory(
    outputs: Sequence[Any],
    views: Sequence[tuple[int, int, Callable[[Any], Any]]],
    written: Sequence[Any],
) -> tuple[Any, ...]:
    """The outputs of a graph, of which those that are views of another, or of an input that the
    graph has `written`, are so for autograd, too: a write to one is seen by both. views: as of
    `views_among`. What has no memory of the whole yet, a LazyGather, refuses to be written."""
    made = list(outputs)
    for of, at, view_of in views:
        if of >= len(outputs):
            whole = written[of - len(outputs)]
            found = view_of(whole) if type(whole) in (torch.Tensor, LazyGather) else None
            made[at] = made[at] if found is None else found
            continue
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
