"""Inner compilers: the local graph becomes a callable.

`inner="tensorrt"`: the conditions under which torch-tensorrt is given a program.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn

import autoshard
from autoshard import passes, runtime
from autoshard.compiling.any_rank import for_any_rank
from autoshard.compiling.cuda_graphs import InductorSettings
from autoshard.compiling.debugging import EQUAL_LAYERS, doing
from autoshard.compiling.debugging import settings as variables
from autoshard.compiling.inductor_order import hold_order
from autoshard.compiling.regions import parts_of
from autoshard.compiling.repeats import traced
from autoshard.config import Config
from autoshard.errors import ConfigError
from autoshard.planning import Plan
from autoshard.runtime import compat
from autoshard.runtime.agreement import AHEAD, compiles
from autoshard.runtime.compat import Finish, aot_eager, inductor_compile
from autoshard.runtime.mesh import Mesh

# torch-tensorrt's defaults take every mask of attention for the causal one, padding or not, and
# hand back torch's own operators where an engine cannot be built.
_TENSORRT = {"attn_bias_is_causal": False, "pass_through_build_failures": True}


def compile_local(
    gm: fx.GraphModule,
    fakes: list[Any],
    inner: str,
    finish: Finish | None = None,
    settings: str = "",
    inductor: InductorSettings = InductorSettings(),  # noqa: B008 (frozen)
    takes_list: bool = False,
) -> Callable[..., Any]:
    """Compile a local graph with the chosen inner compiler.

    inner: "inductor" (AOTAutograd, then Inductor), "aot_eager" (AOTAutograd's graphs, run
    operator by operator), "eager" (the local graph itself; autograd records as it runs) or
    "tensorrt" (torch-tensorrt's backend; `serving.check_serving` says when).
    finish: rewrites each of AOTAutograd's graphs; "eager" and "tensorrt" have none. settings: all
    that `finish` depends on besides the graph and our source: torch's caches on disk are keyed by
    them. inductor: how Inductor is set. takes_list: the result takes a list of the inputs, which it
    clears, so that they are freed after their last use (but by "eager" and "tensorrt").
    """
    if inner == "eager":
        return (lambda values: gm(*values)) if takes_list else gm
    if inner == "tensorrt":
        importlib.import_module("torch_tensorrt")  # registers its backend
        return compat.registered_backend("torch_tensorrt")(gm, fakes, options=_TENSORRT)
    if inner == "aot_eager":
        return _traced(
            gm,
            lambda short: aot_eager(gm, fakes, passes.after_cut, finish, takes_list, short),
        )
    shared, left_out = compiles(), variables().left_out
    gm = for_any_rank(gm)

    def compiled(short: compat.Short | None) -> Callable[..., Any]:
        return inductor_compile(
            gm,
            fakes,
            passes.after_cut,
            finish,
            f"{settings}{left_out}{_source_digest()}",
            hold_order,
            settings=inductor.values,
            fixed=inductor.fixed,
            takes_list=takes_list,
            once=functools.partial(AHEAD.once, shared),
            regions=None if EQUAL_LAYERS in left_out else parts_of,
            doing=functools.partial(doing, begins=True),
            short=short,
        )

    with AHEAD.kernels():
        return _traced(gm, compiled)


def _traced(gm: fx.GraphModule, trace: Callable[[compat.Short | None], Any]) -> Callable[..., Any]:
    """A compiled graph, traced short where it may be: the graph of a training step."""
    return traced(gm, trace) if torch.is_grad_enabled() else trace(None)


def made_ahead(inputs: list[compat.GraphInput], mesh: Mesh, config: Config, device: str) -> Config:
    """The config, and, of a plan that is a folder of `autoshard compile`, what it compiled loaded;
    without that plan where it is another model's or mesh's."""
    folder = None if isinstance(config.plan, Plan) or config.plan is None else Path(config.plan)
    if folder is None or not os.path.isdir(folder):
        return config
    parameters = [item.real for item in inputs if isinstance(item.real, nn.Parameter)]
    kind = torch.cuda.get_device_name() if device == "cuda" else ""
    facts = {
        "model": sorted({f"parameter {list(p.shape)} {p.dtype}" for p in parameters}),
        "options": [f"mesh {mesh.sizes}", *config.lines()],
        "versions": [f"torch {torch.__version__}", f"autoshard {_source_digest()}"],
        "device": [device, compat.kind_of_host(), kind],
    }
    if AHEAD.facts is not None:
        AHEAD.facts.update(facts)
        return config
    other = AHEAD.load(folder, facts)
    return replace(config, plan=None) if other & {"model", "options"} else config


@functools.cache
def _source_digest() -> str:
    """Hash of our source files, part of Inductor's cache key: our passes changed its graphs."""
    folders = [Path(str(package.__file__)).parent for package in (autoshard, runtime, passes)]
    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def check_serving(sizes: Mapping[str, int], device: str) -> None:
    """Raise ConfigError unless torch-tensorrt can run the programs of a mesh.

    sizes: of the mesh's axes. device: type of the model's device. Its converters of collectives
    take all processes torchrun started as their group, whatever group a collective names, so the
    mesh must be one axis tp of all of them. Its engines have no backward.
    """
    if importlib.util.find_spec("torch_tensorrt") is None:
        raise _refusal(
            "torch_tensorrt is not installed", "pip install 'autoshard[torch-tensorrt]'."
        )
    if device != "cuda":
        raise _refusal(
            f"the model is on {device}, and TensorRT runs on an NVIDIA GPU",
            "Move it to the GPU, or take inner='inductor'.",
        )
    world = dist.get_world_size() if dist.is_initialized() else 1
    if sizes.get("tp", 1) != world:
        shown = ", ".join(f"{name}={size}" for name, size in sizes.items())
        raise _refusal(
            f"the mesh is {shown} of {world} processes, and the collectives of torch-tensorrt "
            "are always among all of them",
            f"Give the mesh {{'tp': {world}}}, or export engines: autoshard.export.tensorrt.",
        )
    if torch.is_grad_enabled():
        raise _refusal(
            "it was called with gradients enabled, and TensorRT has no backward",
            "Call the model under torch.no_grad().",
        )


def _refusal(what: str, remedy: str) -> ConfigError:
    return ConfigError(f"options['inner'] is 'tensorrt': {what}", remedy=remedy)
