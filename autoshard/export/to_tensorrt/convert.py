"""A rank graph, node by node, into a network; what both say of each value must agree."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from autoshard.export.errors import ExportError, export_error
from autoshard.export.rank_graph import Port, RankGraph
from autoshard.export.to_tensorrt.converters import CONVERTERS, Lowering


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
        return low.constant(held)
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
