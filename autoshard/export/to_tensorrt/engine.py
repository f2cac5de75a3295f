"""`autoshard.export.tensorrt`: a model becomes a directory of engines, one a rank; and their
networks on the CPU.

There every layer is computed in torch, all ranks in lockstep. The interpreter reads the network
that TensorRT holds, not the converter's intentions, and every value it computes must have the type
and the known sizes that TensorRT inferred. A collective does what its recorded arguments say: with
a wrong reduction the numbers are wrong, with one rank it does nothing.
"""

import importlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter
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
    stand_in,
    write_ranks,
)
from autoshard.export.serial_graph import WeightSource
from autoshard.export.spec import EngineSpec, Example
from autoshard.export.to_tensorrt.build import (
    Network,
    Spy,
    build,
    check_capabilities,
    check_convertible,
    checked_network,
)
from autoshard.export.to_tensorrt.converters import DTYPES, QUANTIZED_DTYPES
from autoshard.export.to_tensorrt.interpreted_layers import LAYERS, attend, unpacked
from autoshard.runtime import collectives
from autoshard.runtime.collectives import Axis, all_gather, all_reduce, all_to_all
from autoshard.runtime.engine import FORMAT, FORMAT_VERSION, Engine, NewWeights


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


class NetworkInterpreter:
    """One rank's network, callable: inputs by name -> outputs by name.

    axis: the ranks it communicates with, by a process group or in lockstep; None where the mesh has
    one rank.
    """

    def __init__(self, network: Network, axis: Axis | None = None) -> None:
        trt, definition = network.trt, network.definition
        self.axis = axis
        self.lowering, self.constants = network.lowering, dict(network.lowering.constants)
        self.inputs = [definition.get_input(i) for i in range(definition.num_inputs)]
        self.outputs = [definition.get_output(i) for i in range(definition.num_outputs)]
        self.recorded = {one.layer.name: one for one in definition.collectives}
        self.classes = {name.lower(): getattr(trt, name) for name in dir(trt)}
        self.steps = self._ordered(definition)

    def new_weights(self) -> NewWeights:
        """As an engine's: memory for new values, of which the network is one afterwards."""
        graph = self.lowering.graph
        table = {
            one.name: {
                "state": one.state,
                "shape": list(self.constants[self.lowering.weights[one.name]].shape),
                "dtype": str(one.dtype).removeprefix("torch."),
            }
            for one in graph.weights.values()
            if one.name in self.lowering.weights
        }

        def take() -> bool:
            for name, value in new.values.items():
                self.constants[self.lowering.weights[name]] = value
            return True

        new = NewWeights(table, graph.rank, graph.tp, take)
        return new

    def _ordered(self, definition: Spy) -> list[Any]:
        """(kind, layer, input tensors, output tensors), each after what it reads."""
        left: list[Any] = []
        for i in range(definition.num_layers):
            layer = definition.get_layer(i)
            kind = layer.type.name  # before the class changes: an activation's own type hides it
            if kind.startswith("ATTENTION_"):
                continue
            if kind not in LAYERS and kind != "DIST_COLLECTIVE":
                raise export_error(f"the interpreter has no layer {kind} ({layer.name})")
            if kind in LAYERS:
                layer.__class__ = self.classes[f"i{kind.lower().replace('_', '')}layer"]
            reads = [layer.get_input(i) for i in range(layer.num_inputs)]
            makes = [layer.get_output(i) for i in range(layer.num_outputs)]
            left.append((kind, layer, reads, makes))
        for one in definition.attentions:
            reads = [one.get_input(i) for i in range(3)] + [one.mask, one.key_value_lengths]
            left.append(("ATTENTION", one, reads, [one.get_output(0)]))
        maker = {tensor.name: i for i, step in enumerate(left) for tensor in step[3]}
        given = {tensor.name for tensor in self.inputs}
        order: TopologicalSorter[int] = TopologicalSorter()
        for i, (_, layer, reads, _) in enumerate(left):
            needed = {t.name for t in reads if t is not None} - given
            if needed - maker.keys():
                raise export_error(f"layer {layer.name} reads what nothing makes")
            order.add(i, *(maker[name] for name in needed))
        return [left[i] for i in order.static_order()]

    def __call__(self, feeds: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Run once. feeds: a tensor for each input; shapes must fit those of the network."""
        values: dict[str, torch.Tensor] = {}
        for tensor in self.inputs:
            values[tensor.name] = self._checked(tensor, feeds[tensor.name], "input")
        read = [t for _, _, reads, _ in self.steps for t in reads if t is not None]
        readers = Counter(tensor.name for tensor in [*read, *self.outputs])
        with torch.no_grad():
            for kind, layer, reads, makes in self.steps:
                given = [None if t is None else values[t.name] for t in reads]
                results = self._run(kind, layer, given)
                for tensor, result in zip(makes, results, strict=True):
                    values[tensor.name] = self._checked(tensor, result, layer.name)
                for tensor in reads:
                    if tensor is not None:
                        readers[tensor.name] -= 1
                        if readers[tensor.name] == 0:
                            del values[tensor.name]
        return {tensor.name: values[tensor.name] for tensor in self.outputs}

    def _run(self, kind: str, layer: Any, given: Sequence[Any]) -> Sequence[torch.Tensor]:
        if kind == "CONSTANT":
            held, made = self.constants[layer.name], layer.get_output(0)
            return [unpacked(held, made.shape) if _name(made.dtype) == "INT4" else held]
        if kind == "ATTENTION":
            return [attend(layer, given)]
        if kind == "DIST_COLLECTIVE":
            return [self._collective(layer, given[0])]
        return LAYERS[kind](layer, given)

    def _collective(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
        recorded = self.recorded[layer.name]
        if layer.num_ranks == 1 or self.axis is None:
            return x
        if recorded.operation == "ALL_GATHER":
            return all_gather(x, self.axis)
        if recorded.operation == "ALL_TO_ALL":
            return all_to_all(x, self.axis)
        result = all_reduce(x, recorded.reduction.lower(), self.axis)
        if recorded.operation == "REDUCE_SCATTER":
            return result.chunk(self.axis.size)[self.axis.rank].contiguous()
        return result

    def _checked(self, tensor: Any, value: torch.Tensor, name: str) -> torch.Tensor:
        """The independent part: what TensorRT inferred for this tensor."""
        said = _name(tensor.dtype)
        shape = tuple(tensor.shape)
        if {**DTYPES, **QUANTIZED_DTYPES}[said] != value.dtype:
            raise export_error(f"{name}: TensorRT inferred {said}, the value is {value.dtype}")
        if len(shape) != value.dim() or any(s not in (-1, v) for s, v in zip(shape, value.shape)):
            raise export_error(
                f"{name}: TensorRT inferred shape {shape}, the value has {tuple(value.shape)}"
            )
        return value


def _name(dtype: Any) -> str:
    return str(dtype).rpartition(".")[2]


class LoneInterpreter(NetworkInterpreter):
    """One rank's network without the other ranks, whose part of each collective is a stand-in."""

    def _collective(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
        operation = self.recorded[layer.name].operation.lower()
        return stand_in(operation, x, self.lowering.graph)


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
