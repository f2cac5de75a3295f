"""Buffers of a model that was made on the meta device: values that no file holds.

A buffer that is not persistent (rotary frequencies, position ids) was computed when its module was
made; on the meta device the result was lost. Hugging Face's `_init_weights` computes it again. It
is asked only for modules without parameters of their own, so that it can write nothing else.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from autoshard.runtime import compat


def meta_buffers(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, torch.Tensor]]:
    """(name, module, name in it, buffer) of every buffer on the meta device."""
    for path, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                yield f"{path}.{name}" if path else name, module, name, buffer


def initialise_buffers(model: nn.Module, device: str) -> None:
    """Compute the buffers on meta that the model knows how to compute; leave the others there.

    A buffer that comes out unwritten goes back to meta, so that nobody reads it.
    """
    owners: dict[nn.Module, list[str]] = {}
    for _, module, name, _ in meta_buffers(model):
        if name in module._non_persistent_buffers_set and not module._parameters:
            owners.setdefault(module, []).append(name)
    for module, names in owners.items():
        initialise = compat.initialiser_of(model, module)
        if initialise is None:
            continue
        before = {name: module._buffers[name] for name in names}
        for name in names:
            module._buffers[name] = _unwritten(before[name], device)
        with torch.no_grad(), torch.device(device):
            initialise(module)
        for name in names:
            if _is_unwritten(module._buffers[name]):
                module._buffers[name] = before[name]


def _unwritten(buffer: Any, device: str) -> torch.Tensor:
    value = torch.empty(buffer.shape, dtype=buffer.dtype, device=device)
    if value.dtype.is_floating_point or value.dtype.is_complex:
        return value.fill_(float("nan"))
    return value.fill_(_mark(value.dtype))


def _is_unwritten(buffer: Any) -> bool:
    if buffer.dtype.is_floating_point or buffer.dtype.is_complex:
        return bool(buffer.isnan().any())
    return bool((buffer == _mark(buffer.dtype)).any())


def _mark(dtype: torch.dtype) -> int:
    return 0 if dtype == torch.bool else torch.iinfo(dtype).min
