"""Which tensors of a checkpoint are quantized: the weights of linear layers and of experts.

Kept as they are: the head and the embeddings, routers (of as many outputs as there are experts, or
fewer than 16), convolutions, whatever is no matrix, and weights whose sizes the layout has not.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from autoshard.export.errors import export_error
from autoshard.export.published_form import CheckpointPart, Description
from autoshard.export.quantization.layouts import WeightLayout, layout
from autoshard.export.serial_graph import unwrapped

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
