"""Inputs of graphs that eager code made of stored tensors: a graph takes them as plain wholes.

    for i in chosen.nonzero():           # breaks the graph: this frame is eager code
        w = self.weight.view(n, f, h)[i]     # a WholeView; `self.weight * 2` is a StoredTensor
        y = self.expert(x, w)                # a frame of its own, whose input `w` is

AOTAutograd traces plain tensors, and its run time refuses any other class.
"""

from __future__ import annotations

from collections.abc import Collection, MutableSequence, Sequence
from typing import Any

import torch
from torch import nn

from autoshard.runtime import compat
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
