"""`autoshard.export.huggingface`: a directory of gathered safetensors with index and configuration.

What `from_pretrained`, vLLM and today's `trtllm-serve` load, and shard again themselves.
"""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autoshard.export.destination import Destination, Progress
from autoshard.export.errors import export_error
from autoshard.export.safetensors_file import SafetensorsFile
from autoshard.export.serial_graph import unwrapped
from autoshard.export.spec import weight_dtype
from autoshard.export.weight_source import WeightSource, WholeParameter

_METADATA = {"format": "pt"}


@dataclass(frozen=True)
class _Tensor:
    """One tensor of the state dict. value: the parameter or buffer as it is stored."""

    name: str
    value: torch.Tensor
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.value.numel() * self.dtype.itemsize


def huggingface(
    model: nn.Module,
    directory: str | Path,
    *,
    dtype: str | torch.dtype | None = None,
    max_shard_bytes: int = 5 * 2**30,
    tokenizer: Any = None,
    progress: Progress | None = None,
) -> Path:
    """Write the whole model as a Hugging Face directory; return the directory.

    model: any module, plain or with the parameters of a running sharded job; then every rank must
    call, one parameter is whole at a time, and rank 0 writes. Names are those of its state dict; a
    parameter under several names is written under the first. `config.json` and
    `generation_config.json` are written where the model has them, and the tokenizer's files where
    one is given.

    dtype: of floating-point parameters: "float16", "bfloat16" or "float32"; None keeps each one's.
    max_shard_bytes: of tensors in one file, where a single tensor is not larger; with more than one
    file there is an index.

    Raises ExportError for parameters without values; a directory appears complete or not at all.
    """
    if max_shard_bytes < 1:
        raise export_error(f"max_shard_bytes={max_shard_bytes} must be at least 1")
    kind = None if dtype is None else weight_dtype(dtype)
    source = WeightSource(model)
    files = _files(_tensors(model, kind), max_shard_bytes)
    total, done = sum(map(len, files.values())), 0
    with Destination(directory, source.job) as destination:
        if source.job.rank == 0:
            destination.attempt(lambda: _beside(model, files, destination.partial, kind, tokenizer))
        for name, tensors in files.items():
            for one in _write(source, destination, name, tensors):
                done += 1
                if progress is not None and source.job.rank == 0:
                    progress(one, done, total)
    return Path(directory)


def _write(
    source: WeightSource, destination: Destination, name: str, tensors: list[_Tensor]
) -> Iterator[str]:
    """One file, one parameter at a time: the name of each, once it is written. Every rank takes
    part in reading, rank 0 writes."""
    sizes = {one.name: (tuple(one.value.shape), one.dtype) for one in tensors}
    with contextlib.ExitStack() as stack:
        opened: list[SafetensorsFile] = []

        def begin() -> None:
            file = SafetensorsFile(destination.partial / name, sizes, _METADATA)
            opened.append(stack.enter_context(file))

        if source.job.rank == 0:
            destination.attempt(begin)
        for one in tensors:
            tensor = one.value.detach()
            if one.name in source.parameters:
                tensor = source.read(one.name, [[WholeParameter()]]).tensor
            for file in opened:
                destination.attempt(partial(file.write, one.name, tensor.to(one.dtype)))
            del tensor
            yield one.name
        for file in opened:
            destination.attempt(file.close)


def _tensors(model: nn.Module, dtype: torch.dtype | None) -> list[_Tensor]:
    """The state dict, each tensor once."""
    found: dict[int, _Tensor] = {}
    for name, value in unwrapped(model).state_dict(keep_vars=True).items():
        if isinstance(value, torch.Tensor) and id(value) not in found:
            floating = value.is_floating_point() and isinstance(value, nn.Parameter)
            found[id(value)] = _Tensor(name, value, dtype if dtype and floating else value.dtype)
    return list(found.values())


def _files(tensors: list[_Tensor], limit: int) -> dict[str, list[_Tensor]]:
    """Tensors in order, in files of at most `limit` bytes; or alone, where one is larger."""
    groups: list[list[_Tensor]] = [[]]
    size = 0
    for one in tensors:
        if groups[-1] and size + one.nbytes > limit:
            groups.append([])
            size = 0
        groups[-1].append(one)
        size += one.nbytes
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    count = len(groups)
    return {f"model-{i:05d}-of-{count:05d}.safetensors": g for i, g in enumerate(groups, 1)}


def _beside(
    model: nn.Module,
    files: dict[str, list[_Tensor]],
    folder: Path,
    dtype: torch.dtype | None,
    tokenizer: Any,
) -> None:
    """Everything but the tensors: index, configurations, tokenizer."""
    inner = unwrapped(model)
    if len(files) > 1:
        size = sum(one.nbytes for tensors in files.values() for one in tensors)
        index = {
            "metadata": {"total_size": size},
            "weight_map": {one.name: name for name, tensors in files.items() for one in tensors},
        }
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (folder / "model.safetensors.index.json").write_text(text)
    config: Any = getattr(inner, "config", None)
    if hasattr(config, "save_pretrained"):
        config = copy.deepcopy(config)
        config.architectures = [type(inner).__name__]
        first = next(inner.parameters(), None)
        if first is not None:
            config.dtype = dtype or first.dtype
        config.save_pretrained(folder)
    generation: Any = getattr(inner, "generation_config", None)
    if hasattr(generation, "save_pretrained"):
        generation.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
