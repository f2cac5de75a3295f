"""`autoshard.export.huggingface`: a directory of gathered safetensors with index and configuration.

What `from_pretrained`, vLLM and today's `trtllm-serve` load, and shard again themselves.
"""

import contextlib
import copy
import json
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autoshard.export.destination import Destination, Progress, SafetensorsFile
from autoshard.export.errors import export_error
from autoshard.export.published_form import (
    CheckpointPart,
    Description,
    add_older_names,
    in_published_form,
    published_parts,
    state_tensors,
    whole_parts,
)
from autoshard.export.quantization import FILE, Inputs, Quantizer
from autoshard.export.quantization import example as random_tokens
from autoshard.export.serial_graph import WeightSource, unwrapped
from autoshard.export.spec import weight_dtype

_METADATA = {"format": "pt"}

Files = dict[str, dict[str, Description]]
"""The tensors of each file, by name."""


def huggingface(
    model: nn.Module,
    directory: str | Path,
    *,
    dtype: str | torch.dtype | None = None,
    max_shard_bytes: int = 5 * 2**30,
    tokenizer: Any = None,
    quantize: str | None = None,
    example: Inputs | None = None,
    progress: Progress | None = None,
) -> Path:
    """Write the whole model as a Hugging Face directory; return the directory.

    model: any module, plain or with the parameters of a running sharded job; then every rank must
    call, one parameter is whole at a time, and rank 0 writes. Names and shapes are those of its
    state dict, and of a model of transformers those that `save_pretrained` writes: the form of its
    published checkpoints. A parameter under several names is written under the first.
    `config.json` and `generation_config.json` are written where the model has them, and the
    tokenizer's files where one is given.

    dtype: of floating-point parameters: "float16", "bfloat16" or "float32"; None keeps each one's.
    max_shard_bytes: of tensors in one file, where a single tensor is not larger; with more than one
    file there is an index.
    quantize: "fp8", "fp8_channel", "int8" or "int4" for the weights of linear layers and experts;
    None for none. How accurate they are is written to `quantization_accuracy.json`: each weight's
    relative error, and what a model in one process says with them of `example`, keyword arguments
    of a call (None: random token ids, where the model takes them), for as much memory again.

    Raises ExportError for parameters without values, and for what cannot be quantized; a directory
    appears complete or not at all.
    """
    if max_shard_bytes < 1:
        raise export_error(f"max_shard_bytes={max_shard_bytes} must be at least 1")
    kind = None if dtype is None else weight_dtype(dtype)
    source = WeightSource(model)
    parts = published_parts(model, state_tensors(model, kind))
    quantizer = None
    if quantize is not None:
        if source.job.size > 1:
            example = None  # its ranks would have to call the model together
        elif example is None:
            example = random_tokens(model)
        quantizer = Quantizer(model, parts, quantize, example)
        parts = quantizer.parts
    written = {name: one for part in parts for name, one in part.written.items()}
    files = _files(written, max_shard_bytes)
    with Destination(directory, source.job) as destination:
        if source.job.rank == 0:
            destination.attempt(lambda: _beside(model, files, destination.partial, kind, tokenizer))
        form = partial(in_published_form, model) if quantizer is None else quantizer.written
        for done, name in enumerate(_write(form, source, destination, files, parts), 1):
            if progress is not None and source.job.rank == 0:
                progress(name, done, len(written))
        if quantizer is not None and source.job.rank == 0:
            destination.attempt(partial(_about, quantizer, destination.partial))
    return Path(directory)


def _about(quantizer: Quantizer, folder: Path) -> None:
    """What config.json says of quantized weights, and how accurate they are."""
    config = folder / "config.json"
    said = json.loads(config.read_text()) if config.exists() else {}
    said["quantization_config"] = quantizer.configuration()
    for path, body in ((config, said), (folder / FILE, quantizer.report())):
        path.write_text(json.dumps(body, indent=2, sort_keys=True) + "\n")


def _write(
    form: Callable[[CheckpointPart, dict[str, torch.Tensor]], dict[str, torch.Tensor]],
    source: WeightSource,
    destination: Destination,
    files: Files,
    parts: list[CheckpointPart],
) -> Iterator[str]:
    """All files, one part at a time: the name of each tensor, once it is written. Every rank takes
    part in reading, rank 0 writes. form: the values to write of a part."""
    place = {name: file for file, tensors in files.items() for name in tensors}
    left = {file: len(tensors) for file, tensors in files.items()}
    with contextlib.ExitStack() as stack:
        opened: dict[str, SafetensorsFile] = {}

        def put(part: CheckpointPart, tensors: dict[str, torch.Tensor]) -> None:
            for name, tensor in form(part, tensors).items():
                file = place[name]
                if file not in opened:
                    made = SafetensorsFile(destination.partial / file, files[file], _METADATA)
                    opened[file] = stack.enter_context(contextlib.closing(made))
                opened[file].write(name, tensor)
                left[file] -= 1
                if left[file] == 0:
                    opened[file].close()

        for part, tensors in whole_parts(source, parts):
            if source.job.rank == 0:
                destination.attempt(partial(put, part, tensors))
            del tensors
            yield from part.written


def _files(tensors: Mapping[str, Description], limit: int) -> Files:
    """Tensors in order, in files of at most `limit` bytes; or alone, where one is larger."""
    groups: list[dict[str, Description]] = [{}]
    size = 0
    for name, one in tensors.items():
        if groups[-1] and size + _bytes(one) > limit:
            groups.append({})
            size = 0
        groups[-1][name] = one
        size += _bytes(one)
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    count = len(groups)
    return {f"model-{i:05d}-of-{count:05d}.safetensors": g for i, g in enumerate(groups, 1)}


def _bytes(one: Description) -> int:
    shape, dtype = one
    return math.prod(shape) * dtype.itemsize


def _beside(
    model: nn.Module,
    files: Files,
    folder: Path,
    dtype: torch.dtype | None,
    tokenizer: Any,
) -> None:
    """Everything but the tensors: index, configurations, tokenizer."""
    inner = unwrapped(model)
    if len(files) > 1:
        size = sum(_bytes(one) for tensors in files.values() for one in tensors.values())
        index = {
            "metadata": {"total_size": size},
            "weight_map": {name: file for file, tensors in files.items() for name in tensors},
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
        add_older_names(folder / "config.json", getattr(config, "attribute_map", None) or {})
    generation: Any = getattr(inner, "generation_config", None)
    if hasattr(generation, "save_pretrained"):
        generation.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
