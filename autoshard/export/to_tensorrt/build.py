"""From a network to the bytes of an engine: profiles, capabilities, and what the builder says."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

import torch

from autoshard.export.errors import ExportError, export_error
from autoshard.export.rank_graph import RankGraph
from autoshard.export.spec import Extent
from autoshard.export.to_tensorrt.convert import convert
from autoshard.export.to_tensorrt.converters import Lowering

_NEEDED = {"fp8": 89, "fp8_channel": 89, "int4": 80}
"""The compute capability, times ten, that layouts of quantized weights need."""


@functools.cache
def log_of(trt: Any) -> Any:
    """The one logger of a process: TensorRT warns of a second. Errors are kept in `.errors`."""

    class Log(trt.ILogger):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.errors: list[str] = []

        def log(self, severity: Any, text: str) -> None:
            if severity in (trt.ILogger.Severity.ERROR, trt.ILogger.Severity.INTERNAL_ERROR):
                self.errors.append(text)

    return Log()


@dataclass
class Network:
    """A network that was filled, and what must live as long as it."""

    trt: Any
    builder: Any
    definition: Any
    lowering: Lowering


def make_network(
    trt: Any, graph: RankGraph, weights: Mapping[str, torch.Tensor], spy: Any = None
) -> Network:
    """Convert a rank graph. spy: called with the network definition; what it returns is filled in
    its place. Raises ExportError, with what TensorRT logged."""
    log = log_of(trt)
    log.errors.clear()
    builder = trt.Builder(log)
    flags = getattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
    definition = builder.create_network(0 if flags is None else 1 << int(flags))
    try:
        filled = convert(trt, spy(definition) if spy else definition, graph, weights)
    except ExportError as error:
        raise _with_log(error, log) from None
    return Network(trt, builder, definition, filled)


def check_capabilities(trt: Any, capabilities: Sequence[str], graph: RankGraph) -> list[Any]:
    """The builder's names of compute capabilities such as "8.9" or "SM89".

    Raises ExportError for one the builder has not, one without the types of quantized weights, and
    for 7.5 where ranks communicate: it builds, and the collectives need 8.0.
    """
    known = getattr(trt, "ComputeCapability", None)
    kinds = {one.quantized.kind for one in graph.weights.values() if one.quantized is not None}
    found = []
    for capability in capabilities:
        name = "SM" + str(capability).upper().removeprefix("SM").replace(".", "")
        if known is None or not hasattr(known, name):
            offered = [] if known is None else [n for n in known.__members__ if n.startswith("SM")]
            raise export_error(
                f"{trt.__name__} {trt.__version__} builds no engine for compute capability "
                f"{capability}",
                remedy=f"It builds for {', '.join(offered)}."
                if offered
                else "It builds for the GPU of the machine it runs on; give no compute_capability.",
            )
        if int(name[2:]) < 80 and graph.tp > 1:
            raise export_error(
                f"compute capability {capability} has no collectives inside engines, and the mesh "
                f"has {graph.tp} ranks",
                remedy="They need 8.0 or later. Export with tp=1 for this GPU.",
            )
        for kind in kinds:
            if int(name[2:]) < _NEEDED.get(kind, 0):
                raise export_error(
                    f"compute capability {capability} has no weights of {kind}, which need "
                    f"{_NEEDED[kind] / 10} or later",
                    remedy="Give quantize='int8', or a later capability.",
                )
        found.append(getattr(known, name))
    return found


def build(network: Network, file: IO[bytes], capabilities: Sequence[Any] = ()) -> None:
    """Write the engine to `file`, as the builder makes it: it is never whole in memory beside the
    builder's own copy. Raises ExportError with what TensorRT logged.
    """
    trt, graph = network.trt, network.lowering.graph
    log_of(trt).errors.clear()
    config = network.builder.create_builder_config()
    preview = getattr(getattr(trt, "PreviewFeature", None), "MULTIDEVICE_RUNTIME_10_16", None)
    if preview is not None and graph.tp > 1:
        config.set_preview_feature(preview, True)
    if capabilities:
        config.num_compute_capabilities = len(capabilities)
        for i, capability in enumerate(capabilities):
            if not config.set_compute_capability(capability, i):
                raise export_error(f"{trt.__name__} refused compute capability {capability}")
    for extents in graph.profiles:
        profile = network.builder.create_optimization_profile()
        for port in graph.inputs:
            if not all(isinstance(size, int) for size in port.shape):
                profile.set_shape(port.name, *shapes_of(extents, port.shape))
        if config.add_optimization_profile(profile) < 0:
            raise _with_log(export_error("TensorRT refused a profile of sizes"), log_of(trt))
    failures: list[Exception] = []

    class Writer(trt.IStreamWriter):  # type: ignore[misc, name-defined]
        def write(self, data: Any) -> int:
            try:
                return file.write(data)
            except Exception as error:  # the builder, which is no Python, calls this
                failures.append(error)
                return 0

    builder, definition = network.builder, network.definition
    complete = builder.build_serialized_network_to_stream(definition, config, Writer())
    if failures:
        raise failures[0]
    if not complete:
        raise _with_log(export_error("TensorRT built no engine"), log_of(trt))


def shapes_of(extents: Mapping[str, Extent], shape: Sequence[int | str]) -> list[tuple[int, ...]]:
    """The smallest, the best and the largest shape of a port."""
    made = []
    for bound in ("minimum", "optimum", "maximum"):
        sizes = [s if isinstance(s, int) else getattr(extents[s], bound) for s in shape]
        made.append(tuple(sizes))
    return made


def _with_log(error: ExportError, log: Any) -> ExportError:
    said = [text.strip() for text in log.errors]
    return ExportError(f"{error} TensorRT says: {said[-1]}") if said else error
