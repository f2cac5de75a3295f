"""The safetensors files of a model: which holds which tensor, and what is wrong with one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from autoshard.errors import AutoshardError
from autoshard.runtime.files import FileEntry, is_directory, is_file, read_json

_INDEX = "model.safetensors.index.json"
_COMPLEX = ("C64",)
_READABLE = (
    *("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", *_COMPLEX),
    *("I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8", "BOOL"),
)
"""Types of the format that torch converts; F4, F6 and F8_E8M0 are parts of a number."""


def tensor_files(path: Path) -> dict[str, Path]:
    """Tensor name -> file."""
    if is_file(path):
        return dict.fromkeys(_names(path), path)
    index = path / _INDEX
    if is_file(index):
        body = read_json(index, "index", AutoshardError, "Copy or save the directory again.")
        return {
            name: path / _beside(entry)
            for name, entry in body.entry("weight_map").entries().items()
        }
    found = sorted(path.glob("*.safetensors")) if is_directory(path) else []
    if not found:
        raise AutoshardError(
            f"{str(path)!r} is neither a safetensors file nor a directory with one",
            remedy="Give a file, or a Hugging Face directory of safetensors.",
        )
    files: dict[str, Path] = {}
    for file in found:
        for name in _names(file):
            if name in files:
                raise AutoshardError(
                    f"{name} is in {files[name]} and in {file}",
                    remedy=f"Give one of the files, or write {_INDEX}.",
                )
            files[name] = file
    return files


def _beside(entry: FileEntry) -> str:
    """The name of a file in the index's own directory. (It may be a symbolic link there: in the
    cache of the Hugging Face hub every file is one.)"""
    name = entry.text()
    if name in ("", ".", "..") or Path(name).name != name or "\0" in name:
        raise entry.refused("not the name of a file in the directory of the index")
    return name


def _names(file: Path) -> list[str]:
    with opened_file(file) as opened:
        return list(opened.keys())


@contextlib.contextmanager
def opened_file(file: Path) -> Iterator[Any]:
    """A safetensors file, opened by the reference library."""
    try:
        import safetensors
    except ModuleNotFoundError as error:
        raise AutoshardError(
            "reading safetensors needs the package of that name",
            remedy="pip install 'autoshard[export]'.",
        ) from error
    if not is_file(file):
        raise AutoshardError(f"{file} does not exist, or is not a regular file")
    with contextlib.ExitStack() as stack:
        with reading(file):
            opened = stack.enter_context(safetensors.safe_open(file, framework="pt"))
        yield opened


@contextlib.contextmanager
def reading(file: Path) -> Iterator[None]:
    """A part of a file is read: what its reader raises names the file."""
    try:
        yield
    except Exception as error:
        raise AutoshardError(
            f"{file} cannot be read as safetensors: {error}",
            remedy="It is damaged or incomplete: copy or save it again.",
        ) from error


def refuse_dtype(kind: str, what: str, wanted: torch.dtype) -> None:
    """Whether a tensor of safetensors' type `kind` can become one of dtype `wanted`."""
    if kind in _COMPLEX and not wanted.is_complex:
        raise AutoshardError(f"{what} is complex ({kind}), and {wanted} in the model")
    if kind not in _READABLE:
        raise AutoshardError(
            f"{what} is of the type {kind}, which is not read",
            remedy=f"Store it as one of {', '.join(_READABLE)}.",
        )
