"""Weights from safetensors: each rank reads the bytes of its own shards.

    autoshard.load_safetensors(model, "path/to/hf")

They are written by `autoshard.export.huggingface`. Which file holds which tensor, and what is wrong
with one, is asked first.

Of a model that was made on the meta device, no file holds some buffers: one that is not persistent
(rotary frequencies, position ids) was computed when its module was made, and the result was lost.
Hugging Face's `_init_weights` computes it again. It is asked only for modules without parameters of
their own, so that it can write nothing else.
"""

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from autoshard.errors import AutoshardError
from autoshard.runtime import compat
from autoshard.runtime.files import FileEntry, read_json
from autoshard.runtime.mesh import axes_of
from autoshard.runtime.parameters import local_bounds, stored_states


class Keys(NamedTuple):
    """The result of `load_state_dict`: names the file lacks, and names the model lacks."""

    missing_keys: list[str]
    unexpected_keys: list[str]


@dataclass(frozen=True)
class _Target:
    """A parameter or buffer to fill. holders: where a whole tensor on meta is replaced."""

    name: str
    tensor: torch.Tensor
    holders: list[tuple[dict[str, Any], str]]


def load_safetensors(model: nn.Module, path: str | Path, *, strict: bool = True) -> Keys:
    """Fill a model from a safetensors file, or from a Hugging Face directory of them.

    model: stored as shards (after `autoshard.shard`, or after the first call of the compiled
        model), on any mesh; or whole, in a single process. On the meta device is fine. Of a stored
        parameter this rank reads the bytes of its own part, and nothing more. No communication.
    path: a file, or a directory with `model.safetensors.index.json` or files `*.safetensors`.
    strict: names that only one side has are an error, as in `load_state_dict`. A tied parameter is
        there if one of its names is.

    Values are converted to the dtype of what they fill. Buffers that no file holds are computed
    where the model is on meta and knows how (Hugging Face's `_init_weights`).

    Returns the names that only one side has. Raises AutoshardError, before anything is written,
    for such names where `strict`, for a shape that differs (with the file and both shapes), for a
    damaged file, an index that names files outside of its directory, and for a parameter on meta
    that nothing stores yet; after it for buffers that are still on meta.
    """
    model = getattr(model, "_orig_mod", model)
    files = tensor_files(Path(path))
    targets = list(_targets(model))
    _refuse_whole_meta(targets)
    found: dict[str, tuple[Path, str]] = {}
    missing = []
    of: dict[str, _Target] = {}
    for names, target in _aliases(targets):
        present = [name for name in names if name in files]
        of.update(dict.fromkeys(names, target))
        if present:
            found[target.name] = (files[present[0]], present[0])
        else:
            missing.extend(names)
    unexpected = [name for name in files if name not in of]
    if strict and (missing or unexpected):
        raise _names_differ(path, missing, unexpected)
    _read(found, of)
    initialise_buffers(model, _device(targets))
    left = [name for name, *_ in meta_buffers(model)]
    if left:
        raise AutoshardError(
            f"{len(left)} buffers are on the meta device and {path} does not hold them: "
            f"{_few(left)}",
            remedy="Their values were computed when the module was made, on meta, and are "
            "lost. Give them again: module.register_buffer(name, value, persistent=False).",
        )
    return Keys(missing, unexpected)


def _read(found: Mapping[str, tuple[Path, str]], of: Mapping[str, _Target]) -> None:
    """Check every shape, then fill: file by file, each opened once."""
    by_file: dict[Path, list[tuple[str, _Target]]] = {}
    for name, (file, stored_as) in found.items():
        by_file.setdefault(file, []).append((stored_as, of[name]))
    for write in (False, True):
        for file, wanted in by_file.items():
            with opened_file(file) as opened:
                for stored_as, target in wanted:
                    with reading(file):
                        source = opened.get_slice(stored_as)
                        shape, kind = tuple(source.get_shape()), source.get_dtype()
                    if write:
                        _fill(target, source, file)
                        continue
                    refuse_dtype(kind, f"{stored_as} in {file}", target.tensor.dtype)
                    want = tuple(target.tensor.shape)
                    if shape != want:
                        raise AutoshardError(
                            f"{stored_as} has shape {shape} in {file}, and {want} in the model",
                            remedy="Load the checkpoint of this configuration.",
                        )


def _fill(target: _Target, source: Any, file: Path) -> None:
    tensor = target.tensor
    if isinstance(tensor, DTensor):
        states, axes = stored_states(tensor), axes_of(tensor.device_mesh)
        bounds = local_bounds(tensor.shape, states, axes)
        local = compat.local_of(tensor)
    else:
        bounds = [(0, size) for size in tensor.shape]
        local = tensor
    if any(first >= end for first, end in bounds):
        return  # fewer rows than ranks: this one holds none
    with reading(file):
        value = source[tuple(slice(first, end) for first, end in bounds)] if bounds else source[...]
    if local.is_meta:
        value = value.to(local.dtype, copy=True)  # what was read is a view of the mapped file
        whole = isinstance(tensor, nn.Parameter)
        new = nn.Parameter(value, tensor.requires_grad) if whole else value
        for holder, name in target.holders:
            holder[name] = new
    else:
        with torch.no_grad():
            local.copy_(value)


def _targets(model: nn.Module) -> Iterator[_Target]:
    """The entries of the state dict, a tied parameter once for each name."""
    holders: dict[int, list[tuple[dict[str, Any], str]]] = {}
    for module in model.modules():
        for registry in (module._parameters, module._buffers):
            for name, tensor in registry.items():
                holders.setdefault(id(tensor), []).append((registry, name))
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, torch.Tensor):
            yield _Target(name, tensor, holders.get(id(tensor), []))


def _aliases(targets: list[_Target]) -> Iterator[tuple[list[str], _Target]]:
    """Every tensor once, with all its names."""
    names: dict[int, list[str]] = {}
    for target in targets:
        names.setdefault(id(target.tensor), []).append(target.name)
    for target in targets:
        if names[id(target.tensor)][0] == target.name:
            yield names[id(target.tensor)], target


def _refuse_whole_meta(targets: list[_Target]) -> None:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    for target in targets:
        tensor = target.tensor
        if isinstance(tensor, nn.Parameter) and tensor.is_meta and not isinstance(tensor, DTensor):
            raise AutoshardError(
                f"parameter {target.name} is on the meta device and nothing stores it yet",
                remedy="Call autoshard.shard(model, ...) with an example batch first: each "
                "rank then reads its shard only.",
            )


def _names_differ(path: str | Path, missing: list[str], unexpected: list[str]) -> AutoshardError:
    parts = []
    if missing:
        parts.append(f"{len(missing)} names of the model are not in it: {_few(missing)}")
    if unexpected:
        parts.append(f"{len(unexpected)} of its names are not in the model: {_few(unexpected)}")
    return AutoshardError(
        f"{path} does not fit the model; " + "; ".join(parts),
        remedy="strict=False loads what both have.",
    )


def _few(names: list[str]) -> str:
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")


def _device(targets: list[_Target]) -> str:
    """The device of the parameters, where buffers belong."""
    for target in targets:
        if isinstance(target.tensor, DTensor):
            return target.tensor.device_mesh.device_type
        if not target.tensor.is_meta:
            return target.tensor.device.type
    return "cpu"


_INDEX = "model.safetensors.index.json"
_COMPLEX = ("C64",)
_READABLE = (
    *("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", *_COMPLEX),
    *("I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8", "BOOL"),
)
"""Types of the format that torch converts; F4, F6 and F8_E8M0 are parts of a number."""


def tensor_files(path: Path) -> dict[str, Path]:
    """Tensor name -> file."""
    if os.path.isfile(path):
        return dict.fromkeys(_names(path), path)
    index = path / _INDEX
    if os.path.isfile(index):
        body = read_json(index, "index", AutoshardError, "Copy or save the directory again.")
        return {
            name: path / _beside(entry)
            for name, entry in body.entry("weight_map").entries().items()
        }
    found = sorted(path.glob("*.safetensors")) if os.path.isdir(path) else []
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
    if not os.path.isfile(file):
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
