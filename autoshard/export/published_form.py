"""A model's tensors in the form of its published checkpoints, a part at a time; its `config.json`.

Transformers holds some families in another form than their checkpoints have (the experts of a
layer in one tensor, modules by other names), and converts back when it saves. Older transformers
and other readers know the published form only. Transformers 5 also writes some entries of the
configuration under new names only (`rope_parameters`, `dtype`); a reader that does not know them
takes its defaults in silence, and the model is another one. The old names are added beside the new,
with the same values.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autoshard.export.errors import export_error
from autoshard.export.serial_graph import WeightSource, unwrapped, whole
from autoshard.runtime import compat

Description = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of a tensor that is written."""


@dataclass(frozen=True)
class StateTensor:
    """One tensor of the state dict. value: the parameter or buffer as it is stored; dtype: that it
    is written in."""

    name: str
    value: torch.Tensor
    dtype: torch.dtype


@dataclass(frozen=True)
class CheckpointPart:
    """Tensors of the state dict that are converted together, and what is written of them: shape
    and dtype by published name. plain: whether they are written as they are."""

    sources: Sequence[StateTensor]
    written: Mapping[str, Description]
    plain: bool = False


def state_tensors(model: nn.Module, dtype: torch.dtype | None) -> list[StateTensor]:
    """The state dict, each tensor once. dtype: of parameters that are floating-point numbers, None
    for their own."""
    found: dict[int, StateTensor] = {}
    for name, value in unwrapped(model).state_dict(keep_vars=True).items():
        if isinstance(value, torch.Tensor) and id(value) not in found:
            floating = value.is_floating_point() and isinstance(value, nn.Parameter)
            found[id(value)] = StateTensor(
                name, value, dtype if dtype and floating else value.dtype
            )
    return list(found.values())


def published_parts(model: nn.Module, tensors: Sequence[StateTensor]) -> list[CheckpointPart]:
    """The parts of a state dict, in its order: one tensor each where it converts by itself.

    Raises ExportError where the parts together are not what the whole converts to.
    """
    inner = unwrapped(model)
    empty = {t.name: torch.empty(t.value.shape, dtype=t.dtype, device="meta") for t in tensors}
    made = compat.published(inner, empty)
    whole = _described(made)
    parts, rest = [], []
    for one in tensors:
        if made.get(one.name) is empty[one.name]:
            parts.append(CheckpointPart([one], {one.name: whole[one.name]}, plain=True))
            continue
        written = _converted(inner, [one], empty)
        if written and written.items() <= whole.items():
            parts.append(CheckpointPart([one], written))
        else:
            rest.append(one)
    if rest:  # converted from several tensors: all of them at once
        parts.append(CheckpointPart(rest, _converted(inner, rest, empty)))
    found = [name for part in parts for name in part.written]
    if len(found) != len(whole) or any(not p.written.items() <= whole.items() for p in parts):
        missing = sorted(whole.keys() - set(found))[:4]
        raise export_error(
            f"{type(inner).__name__} cannot be converted to its published form tensor by tensor: "
            f"{len(found)} tensors for {len(whole)}; missing are {missing}"
        )
    return parts


def in_published_form(
    model: nn.Module, part: CheckpointPart, tensors: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The values to write of a part. tensors: the whole values of its sources, by name."""
    return tensors if part.plain else compat.published(unwrapped(model), tensors)


def whole_parts(
    source: WeightSource, parts: Iterable[CheckpointPart]
) -> Iterator[tuple[CheckpointPart, dict[str, torch.Tensor]]]:
    """Each part with the whole values of its sources, in the dtypes to write; one part at a time.
    Collective where the model stores shards."""
    for part in parts:
        tensors = {}
        for one in part.sources:
            tensor = one.value.detach()
            if one.name in source.parameters:
                tensor = source.read(one.name, [[whole]]).tensor
            tensors[one.name] = tensor.to(one.dtype)
            del tensor
        yield part, tensors
        del tensors


def _converted(
    model: nn.Module, sources: Sequence[StateTensor], empty: Mapping[str, torch.Tensor]
) -> dict[str, Description]:
    try:
        return _described(compat.published(model, {one.name: empty[one.name] for one in sources}))
    except Exception:  # a conversion that needs tensors which are not given says so in many ways
        return {}


def _described(tensors: Mapping[str, torch.Tensor]) -> dict[str, Description]:
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}


_NEOX = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}
_APART = ("rope_theta", "partial_rotary_factor")
"""Entries of `rope_parameters` that have a name of their own in older configurations."""


def add_older_names(file: Path, aliases: Mapping[str, str]) -> None:
    """Add to a `config.json` what older readers look for. aliases: the configuration's other names
    of its entries (`attribute_map`)."""
    said = json.loads(file.read_text())
    made = {**said, **_older(said, aliases)}
    if made != said:
        file.write_text(json.dumps(made, indent=2, sort_keys=True) + "\n")


def _older(said: Mapping[str, Any], aliases: Mapping[str, str]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    if "dtype" in said:
        made["torch_dtype"] = said["dtype"]
    if aliases.get("num_experts") in said:
        made["num_experts"] = said[aliases["num_experts"]]
    rope = said.get("rope_parameters") or {}
    if set(rope) == {"full_attention", "sliding_attention"}:  # Gemma 3
        made["rope_local_base_freq"] = rope["sliding_attention"].get("rope_theta")
        rope = rope["full_attention"]
    if "rope_theta" in rope:
        neox = said.get("model_type") == "gpt_neox"
        for name in _APART:
            if name in rope:
                made[_NEOX[name] if neox else name] = rope[name]
        if rope.get("rope_type", "default") != "default":
            made["rope_scaling"] = {k: v for k, v in rope.items() if k not in _APART}
    if isinstance(said.get("text_config"), dict):
        text = said["text_config"]
        made["text_config"] = {**_older(text, {}), **text}
    return made
