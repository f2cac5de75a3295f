"""The engines of an engine directory, loaded: TensorRT with a communicator.

The directory is read as somebody else's. Nothing it says is run or imported, no file outside of it
is read, and the SHA-256 of an engine is that of config.json before TensorRT sees a byte. TensorRT
is imported when an engine is loaded, by the name in config.json, which is one of BUILDERS.
"""

import ctypes
import hashlib
import importlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from autoshard.runtime import compat
from autoshard.runtime.engine.generation import Engine, NewWeights
from autoshard.runtime.errors import AutoshardError
from autoshard.runtime.files import MOST_RANKS, FileEntry, read_json

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
            f"{path} is of format {found[0]!r:.40} {found[1]!r:.40}, this version reads "
            f"{FORMAT} {FORMAT_VERSION}",
            remedy="Export the engines again with this version.",
        )
    builder = body.entry("builder")
    builder.entry("module").text(*BUILDERS)
    builder.entry("version").text()
    for capability in builder.entry("compute_capabilities").items():
        capability.text()
    refittable = bool(body.optional("refittable", False).value)
    _check_ranks(body.entry("ranks"), refittable)
    _check_ports(body, "output")
    encoder = body.optional("encoder", None)
    if encoder.value is not None:
        _check_ranks(encoder.entry("ranks"), refittable)
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
        raise AutoshardError(f"{path} cannot be read: {error}", remedy=_AGAIN) from error
    found = hashlib.sha256(data).hexdigest()
    if found != entry["sha256"]:
        owners = [i for i, other in enumerate(config["ranks"]) if other["sha256"] == found]
        whose = f"that of rank {owners[0]}" if owners else "that of no rank"
        raise AutoshardError(
            f"{path} is damaged, or another file: its SHA-256 is {found}, {whose} in "
            f"config.json, and that of rank {rank} is {entry['sha256']}",
            remedy=_AGAIN,
        )
    return data


def _inside(directory: Path, name: str) -> Path:
    """The file of that name in the directory, not behind a link that leads out of it."""
    path = directory / name
    if Path(name).name != name or name == ".." or not os.path.isfile(path):
        raise AutoshardError(f"{str(path)!r} is no file of the directory", remedy=_AGAIN)
    if path.resolve().parent != directory.resolve():
        raise AutoshardError(
            f"{path} is a link to {path.resolve()}, outside of the directory",
            remedy="Copy the file itself: only the directory's own files are read.",
        )
    return path


def _check_ranks(ranks: FileEntry, refittable: bool) -> None:
    found = ranks.items()
    if not 1 <= len(found) <= MOST_RANKS:
        raise ranks.refused(f"not a list of 1 to {MOST_RANKS:,} ranks")
    for rank in found:
        rank.entry("file").text()
        digest = rank.entry("sha256")
        if len(digest.text()) != 64 or set(digest.text()) - set("0123456789abcdef"):
            raise digest.refused("not the 64 hexadecimal digits of a SHA-256")
        for weight in rank.entry("weights").entries().values() if refittable else ():
            weight.entry("dtype").text(*_DTYPES)
            weight.entry("state").text()
            for size in weight.entry("shape").items():
                size.integer(1, _MOST)


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


def load(directory: str | Path, group: Any = None) -> Engine:
    """This process's engine, ready to run on its GPU.

    group: the process group of the ranks, of the size of the engine's mesh; None: the whole world,
    which is started from torchrun's variables where it is not. Collective. Raises AutoshardError
    where sizes differ, the directory is damaged or not one of engines, or TensorRT cannot load it.
    """
    config = read_config(directory)
    ranks = len(config["ranks"])
    if ranks > 1 and group is None:
        if not dist.is_initialized():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
            dist.init_process_group("nccl")
        group = dist.group.WORLD
    size = 1 if group is None else dist.get_world_size(group)
    if size != ranks:
        raise AutoshardError(
            f"{directory} holds engines of {ranks} ranks, and the group has {size}",
            remedy=f"Start {ranks} processes, or give load(..., group=) of {ranks}.",
        )
    rank = 0 if group is None else dist.get_rank(group)
    data = read_engine(directory, config, rank)
    encode = None
    if config.get("encoder") is not None:
        encoder = {**config, **config["encoder"]}
        encode = TensorRT(encoder, read_engine(directory, encoder, rank), group, rank)
    execute = TensorRT(config, data, group, rank)
    return Engine(config, execute, torch.device("cuda"), group, encode)


class TensorRT:
    """A deserialized engine and its execution context; an `Execute`.

    config: of the directory. data: the engine's bytes, from `read_engine`, which compared their
    SHA-256: TensorRT itself trusts what it reads. group: the ranks it communicates with. rank: of
    this engine among them.
    """

    def __init__(self, config: Mapping[str, Any], data: bytes, group: Any, rank: int = 0) -> None:
        builder = config["builder"]
        if builder["module"] not in BUILDERS:
            raise AutoshardError(f"{builder['module']!r} builds no engine")
        try:
            trt = importlib.import_module(builder["module"])
        except ImportError as error:
            raise AutoshardError(
                f"the engine was built by {builder['module']} {builder['version']}, which is "
                "not installed"
            ) from error
        self._trt, self._logger = trt, trt.Logger(trt.Logger.WARNING)
        self._runtime = trt.Runtime(self._logger)
        self._engine = self._runtime.deserialize_cuda_engine(data)
        if self._engine is None:
            raise AutoshardError(
                f"{builder['module']} {trt.__version__} cannot load the engine",
                remedy=f"It was built by version {builder['version']} for compute capability "
                f"{', '.join(builder['compute_capabilities']) or 'of its machine'}.",
            )
        self._context = self._engine.create_execution_context()
        if group is not None:
            # torch makes the communicator at the first collective, and keeps it with the group
            dist.all_reduce(torch.zeros(1, device="cuda"), group=group)
            if self._context.set_communicator(_capsule(compat.nccl_communicator(group))) is False:
                raise AutoshardError("the engine refused the NCCL communicator")
        self._inputs, self._outputs = config["inputs"], config["outputs"]
        self._profiles, self._profile = config["profiles"], 0
        self._rank, self._ranks = rank, config["ranks"]
        self._refittable = bool(config.get("refittable"))

    def new_weights(self) -> NewWeights:
        """Memory for new values of all weights, which TensorRT knows of from now on."""
        if not self._refittable:
            raise AutoshardError(
                "the engine's weights cannot be replaced",
                remedy="Export it with refittable=True.",
            )
        trt = self._trt
        refitter = trt.Refitter(self._engine, self._logger)
        table, count = self._ranks[self._rank]["weights"], len(self._ranks)
        new = NewWeights(table, self._rank, count, lambda: bool(refitter.refit_cuda_engine()))
        for name, value in new.values.items():
            dtype = getattr(trt, str(value.dtype).removeprefix("torch."))
            given = trt.Weights(dtype, value.data_ptr(), value.numel())
            if not refitter.set_named_weights(name, given):
                raise AutoshardError(f"the engine has no {name} of shape {tuple(value.shape)}")
        if missing := refitter.get_missing_weights():
            raise AutoshardError(f"the engine's {missing[0]} can only be replaced with {missing}")
        return new

    def __call__(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Run once on the current stream."""
        context = self._context
        self._choose_profile(inputs)
        for name, tensor in inputs.items():
            if not context.set_input_shape(name, tuple(tensor.shape)):
                raise AutoshardError(f"the engine takes no {name} of shape {tuple(tensor.shape)}")
            context.set_tensor_address(name, tensor.data_ptr())
        outputs: dict[str, torch.Tensor] = {}
        for port in self._outputs:
            name = port["name"]
            cache = name.removesuffix("_out")
            if port["role"].endswith("cache"):
                outputs[name] = inputs[cache]  # by contract the same memory
            else:
                shape = tuple(context.get_tensor_shape(name))
                dtype = getattr(torch, port["dtype"])
                outputs[name] = torch.empty(shape, dtype=dtype, device="cuda")
            context.set_tensor_address(name, outputs[name].data_ptr())
        if not context.execute_async_v3(torch.cuda.current_stream().cuda_stream):
            raise AutoshardError("the engine failed to run; TensorRT has logged why")
        return outputs

    def _choose_profile(self, inputs: Mapping[str, torch.Tensor]) -> None:
        """Of the profiles that these sizes are in, the last: the first is of all sizes, the others
        are optimised for some. Where no other is, the first one's error says what the engine takes.
        """
        found = {
            name: size
            for port in self._inputs
            if port["name"] in inputs
            for name, size in zip(port["shape"], inputs[port["name"]].shape)
            if isinstance(name, str)
        }
        fitting = [
            i
            for i, profile in enumerate(self._profiles)
            if all(profile[n]["minimum"] <= s <= profile[n]["maximum"] for n, s in found.items())
        ]
        chosen = max(fitting, default=0)
        if chosen != self._profile:
            stream = torch.cuda.current_stream().cuda_stream
            if not self._context.set_optimization_profile_async(chosen, stream):
                raise AutoshardError(f"the engine refused its profile {chosen}")
            self._profile = chosen


def _capsule(address: int) -> Any:
    """The capsule in which TensorRT takes a communicator."""
    new = ctypes.pythonapi.PyCapsule_New
    new.restype = ctypes.py_object
    new.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    return new(address, None, None)
