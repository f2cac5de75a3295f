"""An engine directory, read as somebody else's: its configuration, and the bytes of an engine.

Nothing it says is run or imported, no file outside of it is read, and the SHA-256 of an engine is
that of config.json before TensorRT sees a byte.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from autoshard.runtime.errors import AutoshardError, message
from autoshard.runtime.input_file import MOST_RANKS, FileEntry, is_file, read_json

FORMAT, FORMAT_VERSION = "autoshard-engine", 1

BUILDERS = ("tensorrt", "tensorrt_rtx")
"""The modules that read an engine; config.json says which, and names no other."""

_AGAIN = "Copy the directory or export the engines again."
_MOST = 2**31 - 1
_DTYPES = ("float32", "float16", "bfloat16", "float8_e4m3fn", "int64", "int32", "int8", "bool")
_ROLES = ("input", "output", "lengths", "last_tokens", "encoded", "key_cache", "value_cache")


def read_config(directory: str | Path) -> dict[str, Any]:
    """The config.json of an engine directory; AutoshardError names the entry that is wrong."""
    path = _inside(Path(directory), "config.json")
    body = read_json(path, "engine configuration", AutoshardError, _AGAIN)
    found = tuple(body.optional(name, None).value for name in ("format", "format_version"))
    if found != (FORMAT, FORMAT_VERSION):
        raise AutoshardError(
            message(
                f"{path} is of format {found[0]!r:.40} {found[1]!r:.40}, this version reads "
                f"{FORMAT} {FORMAT_VERSION}",
                remedy="Export the engines again with this version.",
            )
        )
    builder = body.entry("builder")
    builder.entry("module").text(*BUILDERS)
    builder.entry("version").text()
    for capability in builder.entry("compute_capabilities").items():
        capability.text()
    _check_ranks(body.entry("ranks"))
    _check_ports(body, "output")
    encoder = body.optional("encoder", None)
    if encoder.value is not None:
        _check_ranks(encoder.entry("ranks"))
        _check_ports(encoder, "encoded")
        if len(encoder.value["ranks"]) != len(body.value["ranks"]):
            raise encoder.refused("not of as many ranks as the decoder")
    for token in body.optional("stop", []).items():
        token.integer(0, _MOST)
    config: dict[str, Any] = body.value
    return config


def read_engine(directory: str | Path, config: dict[str, Any], rank: int) -> bytes:
    """The bytes of a rank's engine, whose SHA-256 is the one in config.json."""
    entry = config["ranks"][rank]
    path = _inside(Path(directory), entry["file"])
    try:
        data = path.read_bytes()
    except OSError as error:
        raise AutoshardError(message(f"{path} cannot be read: {error}", remedy=_AGAIN)) from error
    found = hashlib.sha256(data).hexdigest()
    if found != entry["sha256"]:
        owners = [i for i, other in enumerate(config["ranks"]) if other["sha256"] == found]
        whose = f"that of rank {owners[0]}" if owners else "that of no rank"
        raise AutoshardError(
            message(
                f"{path} is damaged, or another file: its SHA-256 is {found}, {whose} in "
                f"config.json, and that of rank {rank} is {entry['sha256']}",
                remedy=_AGAIN,
            )
        )
    return data


def _inside(directory: Path, name: str) -> Path:
    """The file of that name in the directory, not behind a link that leads out of it."""
    path = directory / name
    if Path(name).name != name or name == ".." or not is_file(path):
        raise AutoshardError(message(f"{str(path)!r} is no file of the directory", remedy=_AGAIN))
    if path.resolve().parent != directory.resolve():
        raise AutoshardError(
            message(
                f"{path} is a link to {path.resolve()}, outside of the directory",
                remedy="Copy the file itself: only the directory's own files are read.",
            )
        )
    return path


def _check_ranks(ranks: FileEntry) -> None:
    found = ranks.items()
    if not 1 <= len(found) <= MOST_RANKS:
        raise ranks.refused(f"not a list of 1 to {MOST_RANKS:,} ranks")
    for rank in found:
        rank.entry("file").text()
        digest = rank.entry("sha256")
        if len(digest.text()) != 64 or set(digest.text()) - set("0123456789abcdef"):
            raise digest.refused("not the 64 hexadecimal digits of a SHA-256")


def _check_ports(body: FileEntry, made: str) -> None:
    """Inputs, outputs, sizes and cache: whatever a runner will look up is there. made: the role of
    what the engine is run for."""
    profiles = body.entry("profiles")
    if not profiles.items():
        raise profiles.refused("not one profile or more")
    sizes = profiles.items()[0].entries()
    for profile in profiles.items():
        if profile.entries().keys() != sizes.keys():
            raise profile.refused(f"not of the sizes {sorted(sizes)}")
        for size in profile.entries().values():
            low = size.entry("minimum").integer(1, _MOST)
            size.entry("maximum").integer(low, _MOST)
    inputs, outputs = ([_port(e) for e in body.entry(k).items()] for k in ("inputs", "outputs"))
    for name, dims, role in inputs:
        for dim in dims:
            if isinstance(dim.value, str):
                dim.text(*sizes)
        if role.endswith("cache") and (f"{name}_out", role) not in [(o[0], o[2]) for o in outputs]:
            raise body.entry("outputs").refused(f"and has no {name}_out for the cache {name}")
    caches = {f"{name}_out" for name, _, role in inputs if role.endswith("cache")}
    for name, _, role in outputs:
        if role.endswith("cache") and name not in caches:
            raise body.entry("inputs").refused(f"and has no cache for the output {name}")
    names = [name for name, *_ in (*inputs, *outputs)]
    if len(set(names)) < len(names):
        raise body.entry("inputs").refused("and two inputs or outputs have one name")
    if not any(role == made for _, _, role in outputs):
        raise body.entry("outputs").refused(f"and none of them has the role {made!r}")
    if caches:
        body.entry("kv_cache").entry("max_length").integer(1, _MOST)


def _port(entry: FileEntry) -> tuple[str, list[FileEntry], str]:
    """The name, the sizes and the role of an input or an output."""
    name, dims = entry.entry("name").text(), entry.entry("shape").items()
    for dim in dims:
        if not isinstance(dim.value, str):
            dim.integer(1, _MOST)
    entry.entry("dtype").text(*_DTYPES)
    return name, dims, entry.entry("role").text(*_ROLES)
