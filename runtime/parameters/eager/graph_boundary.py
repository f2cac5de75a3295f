"""What graphs are given of stored tensors by eager code, and what they hand to it.

A graph takes inputs that eager code made of stored tensors as plain wholes: AOTAutograd traces
plain tensors, and its run time refuses any other class.

    for i in chosen.nonzero():           # breaks the graph: this frame is eager code
        w = self.weight.view(n, f, h)[i]     # a WholeView; `self.weight * 2` is a StoredTensor
        y = self.expert(x, w)                # a frame of its own, whose input `w` is

Where `f(self.weight)` leaves the graph (`f` is disabled, or breaks it), `f` gets the value that the
graph has of the weight, which is a gathered copy unless the rank holds the whole: a write to it
would be lost. The copies of a graph are kept until the next graph runs, which finds the writes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, MutableSequence, Sequence
from typing import Any

import torch
from torch import nn

from autoshard.runtime import compat
from autoshard.runtime.errors import AutoshardError
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
