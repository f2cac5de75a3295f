"""`autoshard.export.trtllm`: the checkpoint that `trtllm-build` of TensorRT-LLM <= 1.2 reads.

`config.json` and `rank{r}.safetensors`, r = pp_rank * tp + tp_rank. Later TensorRT-LLM has no
engine backend and loads a Hugging Face directory instead (`autoshard.export.huggingface`).
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autoshard.export.decoder import read_decoder
from autoshard.export.destination import Destination
from autoshard.export.errors import ExportError, export_error
from autoshard.export.safetensors_file import SafetensorsFile
from autoshard.export.serial_graph import model_graph, unwrapped
from autoshard.export.to_trtllm.config import GEMMA, checkpoint_config, family_of, torch_dtype
from autoshard.export.to_trtllm.pieces import Entry, Piece
from autoshard.export.to_trtllm.tensors import Split, check_split, rank_tensors
from autoshard.export.weights import Memory, Part

Progress = Callable[[str, int, int], None]
"""Called with a parameter's name, how many are written, and how many there are."""


def trtllm(
    model: nn.Module,
    directory: str | Path,
    *,
    tp: int = 1,
    pp: int = 1,
    dtype: str | torch.dtype = "float16",
    vocab_parallel_embedding: bool = False,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    max_position_embeddings: int | None = None,
    progress: Progress | None = None,
) -> None:
    """Write a TensorRT-LLM checkpoint of tp x pp ranks to `directory`.

    model: a decoder of the LLaMA, Mistral, Mixtral, Qwen2, Gemma, GPT-2 or Falcon kind; which, and
    the role of each parameter, is read from its graph. A Hugging Face configuration on it must
    agree with the graph. A plain model is written by the calling process alone. Where its
    parameters are shards of a running job every rank must call: rank r of W writes the files r,
    r + W, ..., from its own memory where that holds what they need; other parameters are made
    whole one at a time. The ranks share a file system.

    dtype: float16, bfloat16 or float32. vocab_parallel_embedding: split the token embedding too
    (Gemma always does). args, kwargs: an example call, where [1, 8] token ids will not do.
    max_position_embeddings: where neither graph nor configuration knows it.

    At most one parameter besides the model's own is in memory. Raises ExportError, before any file
    is written, where the format cannot express the model or a size is not divisible; a directory
    appears complete or not at all.
    """
    decoder = read_decoder(model_graph(model, args, kwargs))
    family = family_of(decoder)
    split = Split(
        tp,
        pp,
        torch_dtype(dtype),
        parallel_embedding=tp > 1 if family is GEMMA else vocab_parallel_embedding,
        share_embedding=family is GEMMA,
    )
    if tp < 1 or pp < 1:
        raise export_error(f"tp={tp} and pp={pp} must be at least 1")
    if split.share_embedding and not decoder.tied:
        raise export_error(f"the head of {family.name} must be tied to its embedding")
    check_split(decoder, split)
    hf_config = getattr(unwrapped(model), "config", None)
    config = checkpoint_config(decoder, family, split, hf_config, max_position_embeddings)
    files = [rank_tensors(decoder, split, rank) for rank in range(tp * pp)]
    _write(Memory(model), Path(directory), config, files, progress)


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
    memory: Memory,
    directory: Path,
    config: dict[str, Any],
    files: list[list[Entry]],
    progress: Progress | None,
) -> None:
    destination = Destination(directory, memory.world, memory.rank)
    mine = range(memory.rank, len(files), memory.world)
    with contextlib.ExitStack() as stack:
        stack.callback(destination.abandon)
        opened: dict[int, SafetensorsFile] = {}

        def begin() -> None:
            for rank in mine:
                sizes = {entry.name: (entry.shape, entry.dtype) for entry in files[rank]}
                path = destination.partial / f"rank{rank}.safetensors"
                opened[rank] = stack.enter_context(SafetensorsFile(path, sizes))
            if memory.rank == 0:
                text = json.dumps(config, indent=4)
                (destination.partial / "config.json").write_text(text)

        destination.attempt(begin)
        uses = _uses(files)
        names = [name for name in memory.parameters if name in uses]
        for done, name in enumerate(names, 1):
            wanted: list[list[Piece]] = [[] for _ in range(memory.world)]
            for rank, entry, i in uses[name]:
                wanted[rank % memory.world].append(entry.pieces[i])
            part = memory.read(name, wanted)

            def put(name: str = name, part: Part = part) -> None:
                for rank, entry, i in uses[name]:
                    if rank in opened:
                        _put(opened[rank], entry, i, part)

            destination.attempt(put)
            if progress is not None and memory.rank == 0:
                progress(name, done, len(names))
            del part, put
        for file in opened.values():
            destination.attempt(file.close)
        destination.finish()


def _uses(files: list[list[Entry]]) -> dict[str, list[tuple[int, Entry, int]]]:
    """(file, tensor, number of the piece) of each use of each parameter."""
    uses: dict[str, list[tuple[int, Entry, int]]] = {}
    for rank, entries in enumerate(files):
        for entry in entries:
            for i, piece in enumerate(entry.pieces):
                uses.setdefault(piece.parameter, []).append((rank, entry, i))
    return uses


def _put(file: SafetensorsFile, entry: Entry, number: int, part: Part) -> None:
    piece = entry.pieces[number]
    row = entry.dtype.itemsize
    for size in entry.shape[1:]:
        row *= size
    before = 0
    for other in entry.pieces[:number]:
        assert other.rows is not None  # only pieces of rows are joined
        before += len(other.rows) * row
    taken = piece.take(part.tensor, part.starts, entry.dtype)
    expected = entry.shape if len(entry.pieces) == 1 else taken.shape
    if len(entry.shape) != taken.dim() or tuple(taken.shape[1:]) != tuple(expected[1:]):
        raise export_error(f"{entry.name}: a piece of {piece.parameter} is {tuple(taken.shape)}")
    file.write(entry.name, taken, before)
