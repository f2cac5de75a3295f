"""From a rank graph, node by node, to a network, and on to the bytes of an engine: what torch and
TensorRT say of each value must agree; profiles, capabilities, and what the builder says.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

import torch
from torch import fx

from autoshard.export.errors import ExportError, export_error
from autoshard.export.rank_graph import Port, RankGraph
from autoshard.export.spec import Extent
from autoshard.export.to_tensorrt.converters import COLLECTIVES, CONVERTERS, Lowering

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


@dataclass(frozen=True)
class Recorded:
    """One call of add_dist_collective, as it arrived. layer: what TensorRT returned."""

    operation: str
    reduction: str
    root: Any
    groups: Any
    layer: Any

    @property
    def arguments(self) -> tuple[str, str, Any, Any, int]:
        """What decides what the collective does, the number of ranks as the layer has it now."""
        return self.operation, self.reduction, self.root, self.groups, self.layer.num_ranks


class Spy:
    """Stands in for an INetworkDefinition: forwards everything, and records what its layers do not
    tell: of collectives the operation, the reduction and the groups; attention is in no list."""

    def __init__(self, network: Any) -> None:
        self.network = network
        self.collectives: list[Recorded] = []
        self.attentions: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.network, name)

    def add_dist_collective(self, *args: Any) -> Any:
        """As INetworkDefinition's: (input, operation, reduction, root, groups)."""
        layer = self.network.add_dist_collective(*args)
        if layer is not None:
            _, operation, reduction, root, groups = args
            self.collectives.append(Recorded(operation.name, reduction.name, root, groups, layer))
        return layer

    def add_attention_v2(self, *args: Any) -> Any:
        """As INetworkDefinition's."""
        made = self.network.add_attention_v2(*args)
        if made is not None:
            self.attentions.append(made)
        return made


@dataclass
class Network:
    """A network that was filled, and what must live as long as it."""

    trt: Any
    builder: Any
    definition: Spy
    lowering: Lowering


def make_network(
    trt: Any, graph: RankGraph, weights: Mapping[str, torch.Tensor], spy: type[Spy] = Spy
) -> Network:
    """Convert a rank graph. spy: what fills the network definition. Raises ExportError, with what
    TensorRT logged."""
    log = log_of(trt)
    log.errors.clear()
    builder = trt.Builder(log)
    flags = getattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
    definition = spy(builder.create_network(0 if flags is None else 1 << int(flags)))
    try:
        return Network(trt, builder, definition, convert(trt, definition, graph, weights))
    except ExportError as error:
        raise _with_log(error, log) from None


def checked_network(trt: Any, graph: RankGraph, weights: Mapping[str, torch.Tensor]) -> Network:
    """A rank's network, whose collectives are those of the graph."""
    network = make_network(trt, graph, weights)
    check_collectives(network.definition, graph)
    return network


def check_collectives(spy: Spy, graph: RankGraph) -> None:
    """Raise ExportError unless the network has the graph's collectives, in order, each over all
    ranks of one group, reducing by sum."""
    nodes = [node for node in graph.module.graph.nodes if node.target in COLLECTIVES]
    wanted = [(*COLLECTIVES[node.target], -1, None, graph.tp) for node in nodes]
    found = [recorded.arguments for recorded in spy.collectives]
    if len(found) != len(wanted):
        raise export_error(f"{len(found)} collectives in the network, {len(wanted)} in the graph")
    for node, want, have in zip(nodes, wanted, found, strict=True):
        if want != have:
            names = ("operation", "reduction", "root", "groups", "ranks")
            differ = [(n, w, h) for n, w, h in zip(names, want, have) if w != h]
            said = ", ".join(f"{n} {h!r}, not {w!r}" for n, w, h in differ)
            raise export_error(f"the network's collective has {said}", node)


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


def build(
    network: Network,
    file: IO[bytes],
    capabilities: Sequence[Any] = (),
    refittable: bool = False,
) -> None:
    """Write the engine to `file`, as the builder makes it: it is never whole in memory beside the
    builder's own copy. refittable: its parameters can be replaced. Raises ExportError with what
    TensorRT logged.
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
    if refittable:
        mark_refittable(network, config)
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

    builder, definition = network.builder, network.definition.network
    complete = builder.build_serialized_network_to_stream(definition, config, Writer())
    if failures:
        raise failures[0]
    if not complete:
        raise _with_log(export_error("TensorRT built no engine"), log_of(trt))


def mark_refittable(network: Network, config: Any) -> None:
    """Have an engine keep the parameters, and nothing else, as what a refit replaces."""
    config.set_flag(network.trt.BuilderFlag.REFIT_INDIVIDUAL)
    for name in network.lowering.weights:
        if not network.definition.mark_weights_refittable(name):
            raise export_error(f"TensorRT cannot refit {name}")


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


def check_convertible(graph: RankGraph) -> None:
    """Raise ExportError, naming all of them, where a node has no converter; nothing is built."""
    missing: dict[str, fx.Node] = {}
    for node in graph.module.graph.nodes:
        if node.op == "call_function" and node.target not in CONVERTERS:
            name = str(node.target)  # of a function of Python's, with its address
            missing.setdefault(node.target.__name__ if name[0] == "<" else name, node)
    if missing:
        others = ", ".join(list(missing)[1:])
        raise export_error(
            f"no converter for {next(iter(missing))}" + (f" (nor for {others})" if others else ""),
            next(iter(missing.values())),
            "Write it with other operators, or export without this part of the model.",
        )


def convert(
    trt: Any, network: Any, graph: RankGraph, weights: Mapping[str, torch.Tensor]
) -> Lowering:
    """Fill `network`. weights: this rank's parts, by placeholder.

    The result holds the memory of the constants and must live until the engine is built. Raises
    ExportError where there is no converter, where TensorRT refuses a layer, and where it infers
    another type or shape than torch.
    """
    check_convertible(graph)
    low = Lowering(trt, network, graph)
    ports = {port.name: port for port in graph.inputs}
    for node in graph.module.graph.nodes:
        with low.at(node):
            if node.op == "placeholder":
                low.values[node] = _placeholder(low, str(node.target), ports, weights)
            elif node.op == "call_function":
                try:
                    low.values[node] = CONVERTERS[node.target](low, node)
                except RuntimeError as error:
                    if isinstance(error, ExportError):
                        raise
                    raise low.error(f"TensorRT says: {error}") from error
            elif node.op == "output":
                _outputs(low, node)
                continue
            _agree(low, node)
    return low


def _placeholder(
    low: Lowering, name: str, ports: Mapping[str, Port], weights: Mapping[str, torch.Tensor]
) -> Any:
    if name in ports:
        port = ports[name]
        shape = tuple(size if isinstance(size, int) else -1 for size in port.shape)
        made = low.network.add_input(name, low.dtype(port.dtype), shape)
        if made is None:
            raise low.error(f"TensorRT refused the input {name} of shape {shape}")
        return made
    if name in weights:
        held, weight = weights[name], low.graph.weights.get(name)
        if weight is None or weight.quantized is not None:
            return held  # the values or the scales of what `dequantize` makes
        if held.dtype != weight.dtype:
            raise low.error(f"{weight.name} is {held.dtype}, the graph has {weight.dtype}")
        return low.constant(held, weight.name)
    return low.constant(low.graph.constants[name])


def _agree(low: Lowering, node: fx.Node) -> None:
    """Compare TensorRT's own inference with torch's; sizes it does not know count as equal."""
    val, made = node.meta.get("val"), low.values[node]
    if not isinstance(val, torch.Tensor) or isinstance(made, torch.Tensor):
        return
    if made.dtype != low.dtype(val.dtype):
        raise low.error(f"is {made.dtype} in TensorRT and {val.dtype} in torch")
    if len(made.shape) != val.dim() or any(
        isinstance(e, int) and m >= 0 and e != m for m, e in zip(made.shape, val.shape)
    ):
        said = f"{tuple(made.shape)} in TensorRT and {tuple(val.shape)} in torch"
        raise low.error(f"has shape {said}")


def _outputs(low: Lowering, node: fx.Node) -> None:
    results: Any = node.args[0]
    named: set[str] = set()
    for port, result in zip(low.graph.outputs, results, strict=True):
        tensor = low[result]
        name = port.tensor
        if tensor.is_network_input or tensor.name in named:
            tensor = low.out("add_identity", tensor)
        tensor.name = name
        named.add(name)
        low.network.mark_output(tensor)
