"""`autoshard.export.tensorrt`: a model becomes a directory of engines, one a rank; and their
networks on the CPU.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autoshard.export.destination import Progress
from autoshard.export.errors import export_error
from autoshard.export.rank_graph import (
    RankGraph,
    Runner,
    configuration,
    plan_inference,
    read_weights,
    write_ranks,
)
from autoshard.export.spec import EngineSpec, Example
from autoshard.export.to_tensorrt.build import (
    Network,
    build,
    check_capabilities,
    check_convertible,
    checked_network,
)
from autoshard.export.to_tensorrt.interpreter import LoneInterpreter, NetworkInterpreter
from autoshard.export.weight_source import WeightSource
from autoshard.runtime import collectives
from autoshard.runtime.collectives import Axis
from autoshard.runtime.engine import FORMAT, FORMAT_VERSION, Engine


def tensorrt(
    model: nn.Module,
    directory: str | Path,
    *,
    mesh: Mapping[str, int],
    example: Example | None = None,
    dtype: str | torch.dtype | None = "float16",
    dynamic: Mapping[str, tuple[int, int, int]] | None = None,
    max_length: int | None = None,
    all_logits: bool = False,
    hardware: str = "h100",
    quantize: str | None = None,
    compute_capability: str | Sequence[str] | None = None,
    refittable: bool = False,
    builder: Any = None,
    progress: Progress | None = None,
) -> Path:
    """Write `config.json` and `rank{r}.engine` for each rank of `mesh`; return the directory.

    mesh: {"tp": n}. example: (args, kwargs) of one call; shapes and types count, values do not;
        None: token ids [2, 8].
    dtype: "float16", "bfloat16" or "float32", of the weights; None: as they are.
    dynamic: (minimum, optimum, maximum) of "batch", dim 0 of every input, and of "sequence",
        dim 1; what is not named has the size of the example.
    max_length: tokens a key-value cache holds; None: whole sequences, without a cache.
    all_logits: with a cache, the logits of every token; else of the last token of each row, whose
        place in the call is the input `last_tokens`.
    hardware: the machine to plan for (`autoshard.planning.cost`).
    quantize: "fp8", "fp8_channel", "int8" or "int4" for the weights of linear layers and experts,
        whose numbers are those of `autoshard.export.huggingface`; None: all weights are `dtype`.
        How accurate they are is written to `quantization_accuracy.json`.
    compute_capability: of the GPUs to build for, such as "8.9", or several; None: the builder's
        default.
    refittable: `autoshard.weights.receive(engine)` can replace the weights of a running engine;
        building needs a GPU then.
    builder: the module `tensorrt` (11 or later) or `tensorrt_rtx`; None: the one installed.
    progress: called with (what, done, total).

    From one process: all ranks, one after the other. From a running sharded job: every process
    calls, all see one file system, and each builds the ranks r, r + world, ... from the weights it
    holds. The directory appears complete or not at all. Raises ExportError, before any file is
    written, for a mesh with another axis, an operator without a converter, and a compute capability
    the builder has not, or has no collectives for; with a cache, for an operator other than
    attention that computes a token from others, and where the network, run on the CPU, says another
    token with the cache than without.
    """
    if isinstance(compute_capability, str):
        compute_capability = [compute_capability]
    capabilities = tuple(str(one) for one in compute_capability or ())
    spec = EngineSpec(
        mesh=mesh,
        example=example,
        dtype=dtype,
        dynamic=dynamic,
        max_length=max_length,
        all_logits=all_logits,
        hardware=hardware,
        quantize=quantize,
    )
    form = Engines(builder_module(builder), capabilities, refittable)
    return write_ranks(form, model, directory, spec, progress)


@dataclass
class Engines:
    """The format `autoshard-engine`. capabilities: compute capabilities, such as "8.9"."""

    trt: Any
    capabilities: Sequence[str] = ()
    refittable: bool = False
    name: str = FORMAT
    version: int = FORMAT_VERSION
    suffix: str = ".engine"

    def check(self, graph: RankGraph) -> None:
        check_capabilities(self.trt, self.capabilities, graph)
        check_convertible(graph)
        quantized = [one.name for one in graph.weights.values() if one.quantized is not None]
        if self.refittable and quantized:
            raise export_error(
                f"{quantized[0]} is quantized, and an engine is refitted with weights of its dtype",
                remedy="Export without refittable, or without quantize.",
            )

    def make(self, graph: RankGraph, weights: Mapping[str, torch.Tensor]) -> Network:
        return checked_network(self.trt, graph, weights)

    def runner(self, made: Network, graph: RankGraph) -> Runner:
        """See Format: the network itself, interpreted."""
        return LoneInterpreter(made)

    def write(self, made: Network, file: Path) -> Mapping[str, Any]:
        levels = check_capabilities(self.trt, self.capabilities, made.lowering.graph)
        with file.open("wb") as opened:
            build(made, opened, levels, self.refittable)
        return {}

    def describe(self, graph: RankGraph) -> Mapping[str, Any]:
        builder: dict[str, Any] = {"module": self.trt.__name__, "version": self.trt.__version__}
        builder["compute_capabilities"] = list(self.capabilities)
        return {"builder": builder, "refittable": self.refittable}


def builder_module(builder: Any = None) -> Any:
    """The module that builds: the one given, or `tensorrt` of 11 or later, or `tensorrt_rtx`."""
    if builder is not None and not isinstance(builder, str):
        return builder
    old = ""
    for name in ("tensorrt", "tensorrt_rtx") if builder is None else (builder,):
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        if hasattr(module.INetworkDefinition, "add_dist_collective"):
            return module
        old = f"; {name} {module.__version__} has no collectives"
    raise export_error(
        f"no {builder or 'TensorRT'} is installed that builds engines with collectives{old}",
        remedy="pip install 'autoshard[tensorrt-rtx]', or TensorRT 11 or later.",
    )


def networks(model: nn.Module, spec: EngineSpec, builder: Any = None) -> list[Network]:
    """The networks that `autoshard.export.tensorrt` would build for `spec`, their collectives
    checked: of all ranks in one process; in a running sharded job of as many ranks, of this
    process's rank."""
    trt, source = builder_module(builder), WeightSource(model)
    plan, job = plan_inference(model, spec), source.job
    if 1 < job.size < plan.tp:
        raise export_error(f"{job.size} processes cannot stand for {plan.tp} ranks")
    plan.check_same(job)
    made = []
    for first in range(0, plan.tp, job.size):
        graph = plan.rank_graph((first + job.rank) % plan.tp)
        weights = read_weights(source, graph, first)
        if first + job.rank < plan.tp:
            made.append(checked_network(trt, graph, weights))
    return made


def cpu_engine(network: Network, axis: Axis | None = None, group: Any = None) -> Engine:
    """The runner of one rank with the interpreter in TensorRT's place.

    axis: what the network's collectives go over, None for one rank. group: as of Engine.
    """
    config = configuration(network.lowering.graph, None)
    return Engine(config, NetworkInterpreter(network, axis), "cpu", group)


def generate(
    ranks: Sequence[Network],
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    **options: Any,
) -> list[list[int]]:
    """`Engine.generate` on all ranks of one process in lockstep; all must answer the same."""

    def work(axis: Axis) -> list[list[int]]:
        engine = cpu_engine(ranks[axis.rank], axis if len(ranks) > 1 else None)
        return engine.generate(prompts, max_new_tokens, **options)

    answers = collectives.run_ranks(len(ranks), work, timeout=600)
    if any(answer != answers[0] for answer in answers):
        raise export_error(f"the ranks answer differently: {answers}")
    return answers[0]
