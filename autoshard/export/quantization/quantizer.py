"""The quantized form of a checkpoint, a part at a time, its accuracy, and which tensors are
quantized: the weights of linear layers and of experts.

Kept as they are: the head and the embeddings, routers (of as many outputs as there are experts, or
fewer than 16), convolutions, whatever is no matrix, and weights whose sizes the layout has not.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from autoshard.export.errors import export_error
from autoshard.export.published_form import (
    CheckpointPart,
    Description,
    in_published_form,
    published_parts,
    state_tensors,
    whole_parts,
)
from autoshard.export.quantization.accuracy import Accuracy, Inputs, compared, example
from autoshard.export.quantization.layouts import WeightLayout, layout
from autoshard.export.serial_graph import unwrapped
from autoshard.export.weight_source import WeightSource

_WEIGHT, _FEW = ".weight", 16
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True)
class Quantized:
    """The published names of the weights that are quantized, and of the modules that are not."""

    names: frozenset[str]
    kept: Sequence[str]


def quantized_names(
    model: nn.Module, parts: Sequence[CheckpointPart], kind: str, how: WeightLayout
) -> Quantized:
    """Raises ExportError where there is nothing to quantize, and for experts that the layout has
    not: no server reads a layer of experts that are partly quantized."""
    inner = unwrapped(model)
    modules = dict(inner.named_modules())
    get_head = getattr(inner, "get_output_embeddings", None)
    head = get_head() if get_head is not None else None
    routed = {getattr(getattr(inner, "config", None), name, None) for name in _EXPERTS}
    names: set[str] = set()
    kept = [name for name, module in modules.items() if head is not None and module is head]
    for part in parts:
        owners = [modules.get(one.name.rpartition(".")[0]) for one in part.sources]
        if any(isinstance(owner, nn.Embedding) for owner in owners):
            continue
        stacked = any(one.value.dim() == 3 and one.value.shape[0] in routed for one in part.sources)
        linear = stacked or all(isinstance(o, nn.Linear) and o is not head for o in owners)
        matrices = _matrices(part.written)
        fitting = {name for name, one in matrices.items() if linear and _fits(one, how, routed)}
        if stacked and (len(fitting) < len(part.written) or not how.experts):
            raise export_error(
                f"{part.sources[0].name}, experts in one tensor of {part.sources[0].value.dim()} "
                f"dims, is written as {len(part.written)} tensors of "
                f"{sorted({shape for shape, _ in part.written.values()})}, which {kind} has not"
                + ("" if how.experts else ": transformers reads no experts of it"),
                remedy="Give another layout; quantize='fp8' has matrices of any size.",
            )
        names |= fitting
        kept += [name.removesuffix(_WEIGHT) for name in matrices.keys() - fitting]
    if not names:
        raise export_error(
            f"{type(inner).__name__} has no weight to quantize: no linear layer with inputs that "
            f"{how.inputs} divides",
            remedy="Export without quantize.",
        )
    return Quantized(frozenset(names), sorted(set(kept)))


def _fits(one: Description, how: WeightLayout, routed: Collection[Any]) -> bool:
    (outputs, inputs), dtype = one
    router = outputs < _FEW or outputs in routed
    return not router and inputs % how.inputs == 0 and dtype.is_floating_point


def _matrices(written: Mapping[str, Description]) -> dict[str, Description]:
    return {n: one for n, one in written.items() if n.endswith(_WEIGHT) and len(one[0]) == 2}


def quantized_parameters(
    model: nn.Module, parts: Sequence[CheckpointPart], kind: str
) -> dict[str, int]:
    """The parameters whose weights are quantized in their published form, by name, and how many
    rows each published matrix of it has. Raises ExportError as `quantized_names`, and for one that
    is published in part quantized, or turned."""
    names = quantized_names(model, parts, kind, layout(kind)).names
    found: dict[str, int] = {}
    for part in parts:
        if names.isdisjoint(part.written):
            continue
        shapes = [shape for shape, _ in part.written.values()]
        rows = {shape[0] for shape in shapes if len(shape) == 2}
        for one in part.sources:
            alike = {shape[-1] for shape in shapes} == {one.value.shape[-1]}
            if not part.written.keys() <= names or len(rows) != 1 or not alike:
                raise export_error(
                    f"{one.name} is published as {len(shapes)} tensors of {sorted(set(shapes))}, "
                    "which are no rows of it that are quantized alike",
                    remedy="Export a Hugging Face directory, or without quantize.",
                )
            (found[one.name],) = rows
    return found


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
