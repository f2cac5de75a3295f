"""Load the engines of an engine directory: TensorRT with a communicator.

TensorRT is imported when an engine is loaded, by the name in config.json, which is one of BUILDERS.
"""

from __future__ import annotations

import ctypes
import importlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from autoshard.runtime import compat
from autoshard.runtime.engine.directory import BUILDERS, read_config, read_engine
from autoshard.runtime.engine.generation import Engine
from autoshard.runtime.errors import AutoshardError, message


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
            message(
                f"{directory} holds engines of {ranks} ranks, and the group has {size}",
                remedy=f"Start {ranks} processes, or give load(..., group=) of {ranks}.",
            )
        )
    rank = 0 if group is None else dist.get_rank(group)
    data = read_engine(directory, config, rank)
    encode = None
    if config.get("encoder") is not None:
        encoder = {**config, **config["encoder"]}
        encode = TensorRT(encoder, read_engine(directory, encoder, rank), group)
    return Engine(config, TensorRT(config, data, group), torch.device("cuda"), group, encode)


class TensorRT:
    """A deserialized engine and its execution context; an `Execute`.

    config: of the directory. data: the engine's bytes, from `read_engine`, which compared their
    SHA-256: TensorRT itself trusts what it reads. group: the ranks it communicates with.
    """

    def __init__(self, config: Mapping[str, Any], data: bytes, group: Any) -> None:
        builder = config["builder"]
        if builder["module"] not in BUILDERS:
            raise AutoshardError(message(f"{builder['module']!r} builds no engine"))
        try:
            trt = importlib.import_module(builder["module"])
        except ImportError as error:
            raise AutoshardError(
                message(
                    f"the engine was built by {builder['module']} {builder['version']}, which is "
                    "not installed"
                )
            ) from error
        self._runtime = trt.Runtime(trt.Logger(trt.Logger.WARNING))
        self._engine = self._runtime.deserialize_cuda_engine(data)
        if self._engine is None:
            raise AutoshardError(
                message(
                    f"{builder['module']} {trt.__version__} cannot load the engine",
                    remedy=f"It was built by version {builder['version']} for compute capability "
                    f"{', '.join(builder['compute_capabilities']) or 'of its machine'}.",
                )
            )
        self._context = self._engine.create_execution_context()
        if group is not None:
            # torch makes the communicator at the first collective, and keeps it with the group
            dist.all_reduce(torch.zeros(1, device="cuda"), group=group)
            if self._context.set_communicator(_capsule(compat.nccl_communicator(group))) is False:
                raise AutoshardError(message("the engine refused the NCCL communicator"))
        self._inputs, self._outputs = config["inputs"], config["outputs"]
        self._profiles, self._profile = config["profiles"], 0

    def __call__(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Run once on the current stream."""
        context = self._context
        self._choose_profile(inputs)
        for name, tensor in inputs.items():
            if not context.set_input_shape(name, tuple(tensor.shape)):
                raise AutoshardError(
                    message(f"the engine takes no {name} of shape {tuple(tensor.shape)}")
                )
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
            raise AutoshardError(message("the engine failed to run; TensorRT has logged why"))
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
                raise AutoshardError(message(f"the engine refused its profile {chosen}"))
            self._profile = chosen


def _capsule(address: int) -> Any:
    """The capsule in which TensorRT takes a communicator."""
    new = ctypes.pythonapi.PyCapsule_New
    new.restype = ctypes.py_object
    new.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    return new(address, None, None)
