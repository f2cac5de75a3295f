"""The tensors of a model that are no parameters: rank 0's on every rank from the first call on.

Buffers, as DistributedDataParallel sends them, and tensors that a module holds as an attribute, or
in a list or dict that is one. Of the attributes only those that the model had when it was given to
torch.compile: what was set or written since may be of a rank's own batch.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autoshard.runtime import compat
from autoshard.runtime.agreement import SAME, agree, combined, described, everyone, gather
from autoshard.runtime.collectives import Axis
from autoshard.runtime.mesh import Mesh

REMEDY = (
    "Give it the same values on all ranks (the same seed, the file read by all of them), or leave "
    "options['same_inputs']['weights'] at 'broadcast'."
)
_OF_TORCH = ("_parameters", "_modules", "_buffers")

_given: weakref.WeakKeyDictionary[nn.Module, dict[str, tuple[Any, int]]] = (
    weakref.WeakKeyDictionary()
)
"""The attributes of each module when it was given to torch.compile: a reference, a version."""

_settled: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Modules whose tensors have been made rank 0's; what their forwards write is a rank's own."""


def note_attributes(model: nn.Module) -> None:
    """Remember the tensors that the modules of a model have as attributes now."""
    for module in model.modules():
        _given[module] = {
            name: (weakref.ref(t), compat.writes_to(t)) for name, t in _attributes(module)
        }


def settle_buffers(models: Sequence[nn.Module], mesh: Mesh, *, send: bool) -> None:
    """Give every rank rank 0's buffers and attributes of the models, once for each module.

    send: False: compare them only, and raise PlanMismatchError on all ranks where they differ.
    Buffers have to be the same ones on all ranks, of the same dtypes and shapes: PlanMismatchError
    where not. An attribute that only some have, or have of other shapes, is left alone. Written is
    in place, and only what differs. Collective over the mesh.
    """
    buffers: dict[str, torch.Tensor] = {}
    others: dict[str, torch.Tensor] = {}
    for number, model in enumerate(models):
        inner = getattr(model, "_orig_mod", model)
        for path, module in inner.named_modules(prefix=str(number) if number else ""):
            if module in _settled:
                continue
            _settled.add(module)
            prefix = f"{path}." if path else ""
            buffers.update((prefix + k, b) for k, b in module._buffers.items() if _is_plain(b))
            given = _given.get(module, {})
            others.update(
                (prefix + name, tensor)
                for name, tensor in _attributes(module)
                if name in given and _is_as_given(tensor, *given[name])
            )
    buffers, others = dict(sorted(buffers.items())), dict(sorted(others.items()))
    _, digest = _told({**others, **buffers})
    asked = [combined(digest, "buffers", axis, _alike, alike=True) for axis in everyone(mesh.axes)]
    if all(found is SAME or found for found in asked):
        return
    for axis in reversed(mesh.axes):
        if axis.size > 1:
            _settle(buffers, others, mesh, axis, send)


def _told(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, str], str]:
    """A line for each tensor, and a digest of them all."""
    lines = {name: described(tensor) for name, tensor in tensors.items()}
    return lines, _digest([f"{name}: {line}" for name, line in lines.items()])


def _alike(given: Sequence[str]) -> bool:
    return len({*given}) == 1


def _settle(
    buffers: Mapping[str, torch.Tensor],
    others: Mapping[str, torch.Tensor],
    mesh: Mesh,
    axis: Axis,
    send: bool,
) -> None:
    what, tensors = "buffers", {**others, **buffers}
    lines, digest = _told(tensors)
    if len(set(gather(digest, what, axis, alike=True))) == 1:
        return
    heads = [f"{name}: {described(b, contents=False)}" for name, b in buffers.items()]
    agree(what, _digest(heads), heads, axis)
    same: dict[str, bool] = combined(lines, f"lines of {what}", axis, _same_heads)
    if not send:
        values = [f"{name}: {lines[name]}" for name in same]
        agree("values of buffers", _digest(values), values, axis, remedy=REMEDY)
        return
    assert mesh.device_mesh is not None
    for name in same:
        if not same[name]:
            _take(tensors[name], axis, mesh.device_mesh.device_type)


def _same_heads(everywhere: Sequence[Mapping[str, str]]) -> dict[str, bool]:
    """The tensors that have one dtype and shape on all ranks; whether their values are the same."""
    return {
        name: all(one[name] == line for one in everywhere)
        for name, line in everywhere[0].items()
        if all(_head(one.get(name)) == _head(line) for one in everywhere)
    }


def _head(line: str | None) -> str:
    return "" if line is None else line.partition(", hash")[0]


def _take(tensor: torch.Tensor, axis: Axis, device: str) -> None:
    """The values of the first rank of the axis, in place."""
    tensor = tensor.detach()
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:  # expanded: one place in memory for all of them
            tensor = tensor.narrow(dim, 0, 1)
    sent = tensor.to(device, copy=True, memory_format=torch.contiguous_format)
    octets = sent.view(-1).view(torch.uint8)  # not every backend knows every dtype
    dist.broadcast(octets, group=compat.process_group(axis.group), group_src=0)
    if axis.rank > 0:
        with torch.inference_mode(tensor.is_inference()), torch.no_grad():
            tensor.copy_(sent)


def _is_as_given(tensor: torch.Tensor, reference: Any, version: int) -> bool:
    return reference() is tensor and compat.writes_to(tensor) == version


def _attributes(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for key, value in vars(module).items():
        if key not in _OF_TORCH:
            yield from _tensors_in(key, value)


def _tensors_in(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of nested lists, tuples and dicts, by the expressions that read them."""
    if _is_plain(value) and not value.is_inference():
        yield name, value
    elif type(value) in (list, tuple):
        for i, each in enumerate(value):
            yield from _tensors_in(f"{name}[{i}]", each)
    elif type(value) is dict:
        for key, each in value.items():
            yield from _tensors_in(f"{name}[{key!r}]", each)


def _is_plain(value: Any) -> bool:
    return type(value) is torch.Tensor and value.layout == torch.strided and value.grad_fn is None


def _digest(lines: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
