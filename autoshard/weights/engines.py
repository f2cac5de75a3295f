"""The weights of a rank's TensorRT engine, as a target: which part of which parameter each of them
is stands in the engine's config.json."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from autoshard.errors import AutoshardError
from autoshard.runtime.collectives import shard_dim
from autoshard.runtime.engine import Engine, NewWeights
from autoshard.weights.boxes import Box
from autoshard.weights.parts import Offered, WantedBox


class EngineTensors:
    """What the engine of a rank takes, for `autoshard.weights.receive`. It must have been exported
    with refittable=True, and run nothing while it is refitted."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._new: list[NewWeights] = []

    def slots(self, offered: Mapping[str, Offered]) -> dict[str, list[WantedBox]]:
        """See Receiver. The engine is asked for every weight before anything travels."""
        found: dict[str, list[WantedBox]] = {}
        self._new = self._engine.new_weights()
        for new in self._new:
            for name in new.table:
                if name not in offered:
                    raise AutoshardError(
                        f"{name} of the engine is not sent",
                        remedy="Send the model that the engine was exported from.",
                    )
                box = _box(name, new, offered[name].shape)
                found.setdefault(offered[name].of, []).append(WantedBox(box, new.values[name]))
        return found

    def tensors(self) -> Iterable[torch.Tensor]:
        """See Receiver: TensorRT takes them from the host."""
        return ()

    def swap(self) -> None:
        """See Receiver."""
        for new in self._new:
            new.take()
        self.drop()

    def drop(self) -> None:
        """See Receiver."""
        self._new = []


def _box(name: str, new: NewWeights, shape: tuple[int, ...]) -> Box:
    """Where a rank's part of a weight lies in the whole, of `shape`."""
    whole = list(new.table[name]["shape"])
    box = [(0, size) for size in whole]
    dim = shard_dim(new.table[name]["state"])
    if dim is not None:
        box[dim] = (whole[dim] * new.rank, whole[dim] * (new.rank + 1))
        whole[dim] *= new.ranks
    if tuple(whole) != shape:
        raise AutoshardError(
            f"{name} has the shape {whole} in the engine, and is sent as {list(shape)}",
            remedy="Send the model that the engine was exported from.",
        )
    return tuple(box)
