"""`autoshard.export.trtllm`: the checkpoint that `trtllm-build` of TensorRT-LLM <= 1.2 reads.

`config.json` and `rank{r}.safetensors`, r = pp_rank * tp + tp_rank. Later TensorRT-LLM has no
engine backend and loads a Hugging Face directory instead (`autoshard.export.huggingface`).
"""

import json
import math
import shutil
import subprocess
from collections.abc import Mapping
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autoshard.export.decoder import read_decoder
from autoshard.export.destination import Destination, Progress, SafetensorsFile
from autoshard.export.errors import ExportError, export_error, on_every_rank
from autoshard.export.serial_graph import (
    Block,
    ModelGraph,
    Region,
    WeightSource,
    model_graph,
    unwrapped,
)
from autoshard.export.spec import Example, axis_sizes, weight_dtype
from autoshard.export.to_trtllm.config import checkpoint_config
from autoshard.export.to_trtllm.families import family_of
from autoshard.export.to_trtllm.tensors import Entry, Split, check_split, rank_tensors
from autoshard.runtime import compat

_REMEDY = (
    "TensorRT-LLM checkpoints are of decoders of token ids; other models go to "
    "autoshard.export.onnx or autoshard.export.tensorrt."
)


def _other_inputs(model: nn.Module) -> str | None:
    """What a call needs besides token ids, as far as a configuration says it."""
    inner = unwrapped(model)
    config, name = getattr(inner, "config", None), getattr(inner, "main_input_name", "input_ids")
    if name != "input_ids":
        return f"takes {name}"
    if getattr(config, "is_encoder_decoder", False):
        return "has an encoder"
    return "takes images" if hasattr(config, "vision_config") else None


def _traced(model: nn.Module, example: Example | None) -> ModelGraph:
    """The graph of the model; ExportError where torch cannot trace it with the example."""
    if example is None and (other := _other_inputs(model)):
        raise export_error(f"{type(unwrapped(model)).__name__} {other}", remedy=_REMEDY)
    try:
        return model_graph(model, *(example or ((), {})))
    except compat.TraceError as error:
        reason = next(filter(None, map(str.strip, str(error).splitlines())), type(error).__name__)
        given = "the example" if example else "token ids alone"
        raise export_error(
            f"the model cannot be traced with {given}: {reason}",
            remedy=_REMEDY,
        ) from error


def trtllm(
    model: nn.Module,
    directory: str | Path,
    *,
    mesh: Mapping[str, int],
    example: Example | None = None,
    dtype: str | torch.dtype = "float16",
    vocab_parallel_embedding: bool = False,
    max_position_embeddings: int | None = None,
    progress: Progress | None = None,
) -> Path:
    """Write a TensorRT-LLM checkpoint for the ranks of `mesh`; return the directory.

    model: a decoder of a family that `families.py` lists; which, and the role of each parameter,
    is read from its graph. A Hugging Face configuration on it must
    agree with the graph. A plain model is written by the calling process alone. Where its
    parameters are shards of a running job every rank must call: rank r of W writes the files r,
    r + W, ..., from its own memory where that holds what they need; other parameters are made
    whole one at a time. The ranks share a file system.

    mesh: {"tp": tensor-parallel ranks, "pp": pipeline stages}, each 1 where it is left out.
    example: (args, kwargs) of one call, where [1, 8] token ids will not do. dtype: "float16",
    "bfloat16" or "float32". vocab_parallel_embedding: split the token embedding too (Gemma always
    does). max_position_embeddings: where neither graph nor configuration knows it.

    At most one parameter besides the model's own is in memory. Raises ExportError, before any file
    is written, where the format cannot express the model or a size is not divisible; a directory
    appears complete or not at all.
    """
    why = "a checkpoint is divided among the axes tp and pp"
    remedy = "Give mesh={'tp': n, 'pp': m}; replicas of a server each load the same checkpoint."
    tp, pp = axis_sizes(mesh, ("tp", "pp"), why, remedy)
    kind, source = weight_dtype(dtype), WeightSource(model)

    def prepare() -> tuple[dict[str, Any], list[list[Entry]]]:
        decoder = read_decoder(_traced(model, example))
        hf_config = getattr(unwrapped(model), "config", None)
        family = family_of(decoder, hf_config)
        shared = family.shares_embedding
        split = Split(
            tp,
            pp,
            kind,
            parallel_embedding=tp > 1 if shared else vocab_parallel_embedding,
            share_embedding=shared,
        )
        check_split(decoder, family, split)
        config = checkpoint_config(decoder, family, split, hf_config, max_position_embeddings)
        return config, [rank_tensors(decoder, family, split, rank) for rank in range(tp * pp)]

    with Destination(directory, source.job) as destination:
        config, files = on_every_rank(prepare, "checkpoint", source.job)
        _write(source, destination, config, files, progress)
    return Path(directory)


def trtllm_build(checkpoint: str | Path, engines: str | Path, *options: str) -> None:
    """Run `trtllm-build` on a checkpoint. options: further arguments for it.

    Raises ExportError that says what is missing where it is not installed, or where it fails.
    """
    program = shutil.which("trtllm-build")
    if program is None:
        raise export_error(
            "trtllm-build is not installed: the checkpoint is complete, no engine was built",
            remedy="It comes with tensorrt-llm 1.2 or earlier, on a machine with a GPU; later "
            "versions have no engine backend and serve a Hugging Face directory "
            "(autoshard export huggingface).",
        )
    command = [program, "--checkpoint_dir", str(checkpoint), "--output_dir", str(engines)]
    done = subprocess.run([*command, *options])
    if done.returncode:
        raise ExportError(f"trtllm-build ended with status {done.returncode}.")


def _write(
    source: WeightSource,
    destination: Destination,
    config: dict[str, Any],
    files: list[list[Entry]],
    progress: Progress | None,
) -> None:
    job = source.job
    uses = _uses(files)
    names = [name for name in source.parameters if name in uses]
    opened: dict[int, SafetensorsFile] = {}
    with ExitStack() as stack:

        def begin() -> None:
            for rank in range(job.rank, len(files), job.size):
                sizes = {entry.name: (entry.shape, entry.dtype) for entry in files[rank]}
                path = destination.partial / f"rank{rank}.safetensors"
                opened[rank] = stack.enter_context(closing(SafetensorsFile(path, sizes)))
            if job.rank == 0:
                text = json.dumps(config, indent=4)
                (destination.partial / "config.json").write_text(text)

        def put(name: str, block: Block) -> None:
            for rank, entry, i in uses[name]:
                if rank in opened:
                    _put(opened[rank], entry, i, block)

        destination.attempt(begin)
        for done, name in enumerate(names, 1):
            wanted: list[list[Region]] = [[] for _ in range(job.size)]
            for rank, entry, i in uses[name]:
                wanted[rank % job.size].append(entry.pieces[i].needs)
            destination.attempt(partial(put, name, source.read(name, wanted)))
            if progress is not None and job.rank == 0:
                progress(name, done, len(names))
        for file in opened.values():
            destination.attempt(file.close)


def _uses(files: list[list[Entry]]) -> dict[str, list[tuple[int, Entry, int]]]:
    """(file, tensor, number of the piece) of each use of each parameter."""
    uses: dict[str, list[tuple[int, Entry, int]]] = {}
    for rank, entries in enumerate(files):
        for entry in entries:
            for i, piece in enumerate(entry.pieces):
                uses.setdefault(piece.parameter, []).append((rank, entry, i))
    return uses


def _put(file: SafetensorsFile, entry: Entry, number: int, block: Block) -> None:
    piece = entry.pieces[number]
    # only pieces of rows are joined
    before = sum(len(other.rows) for other in entry.pieces[:number] if other.rows is not None)
    taken = piece.take(block.tensor, block.starts, entry.dtype)
    expected = entry.shape if len(entry.pieces) == 1 else taken.shape
    if len(entry.shape) != taken.dim() or tuple(taken.shape[1:]) != tuple(expected[1:]):
        raise export_error(f"{entry.name}: a piece of {piece.parameter} is {tuple(taken.shape)}")
    file.write(entry.name, taken, before * entry.dtype.itemsize * math.prod(entry.shape[1:]))
