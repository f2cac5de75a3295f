"""The quantized form of a checkpoint, a part at a time, and its accuracy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from autoshard.export.published_form import (
    CheckpointPart,
    in_published_form,
    published_parts,
    state_tensors,
    whole_parts,
)
from autoshard.export.quantization.accuracy import Accuracy, Inputs, compared, example
from autoshard.export.quantization.choice import quantized_names
from autoshard.export.quantization.layouts import layout
from autoshard.export.weight_source import WeightSource


class Quantizer:
    """Quantizes the weights of a model that a layout has.

    kind: name of the layout. parts: of the checkpoint as it is published. inputs: of a call of the
    model, with which its outputs are compared; None: only weights are. Raises ExportError for an
    unknown layout, one whose library is missing, and a model without a weight to quantize.
    """

    def __init__(
        self,
        model: nn.Module,
        parts: Sequence[CheckpointPart],
        kind: str,
        inputs: Inputs | None,
    ) -> None:
        self._model, self._kind, self._inputs = model, kind, inputs
        self._layout = layout(kind)
        chosen = quantized_names(model, parts, kind, self._layout)
        self._names, self._kept = chosen.names, chosen.kept
        self._accuracy = Accuracy(keep=inputs is not None)
        self.parts = [self._described(part) for part in parts]

    def _described(self, part: CheckpointPart) -> CheckpointPart:
        """What is written of a part, told by tensors without memory."""
        written = {}
        for name, (shape, dtype) in part.written.items():
            empty = torch.empty(shape, dtype=dtype, device="meta")
            for new, tensor in self._tensors(name, empty).items():
                written[new] = (tuple(tensor.shape), tensor.dtype)
        return replace(part, written=written)

    def _tensors(self, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """What is written in the place of one published tensor."""
        if name not in self._names:
            return {name: tensor}
        made = self._layout.quantized(tensor)
        return {f"{name.removesuffix('weight')}{last}": one for last, one in made.items()}

    def written(
        self, part: CheckpointPart, tensors: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """The values to write of a part. tensors: the whole values of its sources, by name."""
        given = dict(tensors)
        made: dict[str, torch.Tensor] = {}
        restored: dict[str, torch.Tensor] = {}
        for name, tensor in in_published_form(self._model, part, given).items():
            new = self._tensors(name, tensor)
            made |= new
            if name in self._names:
                stem = name.removesuffix("weight")
                state = {full.removeprefix(stem): one for full, one in new.items()}
                restored[name] = self._layout.restored(state)
                self._accuracy.add(name, tensor, restored[name])
        published = partial(in_published_form, self._model, part)
        self._accuracy.keep_values(given, published, restored)
        return made

    def configuration(self) -> dict[str, Any]:
        """`quantization_config` of config.json."""
        return self._layout.configuration(self._kept)

    def report(self) -> dict[str, Any]:
        """How accurate the whole is, once every part is written."""
        found = {"quantize": self._kind, "weights": self._accuracy.weights()}
        if self._inputs is not None:
            found["outputs"] = compared(self._model, self._accuracy, self._inputs)
        return found


def measured(model: nn.Module, source: WeightSource, dtype: torch.dtype | None, kind: str) -> Any:
    """How accurate a model is with its weights quantized, where nothing is written of them.
    Collective where the model stores shards; then weights alone are compared."""
    inputs = example(model) if source.job.size == 1 else None
    quantizer = Quantizer(model, published_parts(model, state_tensors(model, dtype)), kind, inputs)
    for part, tensors in whole_parts(source, quantizer.parts):
        if source.job.rank == 0:
            quantizer.written(part, tensors)
    return quantizer.report() if source.job.rank == 0 else None
