"""What a network computes, on the CPU: every layer in torch, all ranks in lockstep.

It reads the network that TensorRT holds, not the converter's intentions, and every value it
computes must have the type and the known sizes that TensorRT inferred. A collective does what its
recorded arguments say: with a wrong reduction the numbers are wrong, with one rank it does nothing.

A layer of collectives does not tell its operation, its reduction or its groups once it is made,
and attention is no layer that can be listed; both are recorded at the call, by `Spy`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter
from typing import Any

import torch

from autoshard.export.errors import export_error
from autoshard.export.rank_graph import RankGraph, stand_in
from autoshard.export.to_tensorrt.build import Network
from autoshard.export.to_tensorrt.converters import DTYPES, QUANTIZED_DTYPES
from autoshard.export.to_tensorrt.interpreted_layers import LAYERS, attend, unpacked
from autoshard.runtime.collectives import Axis, all_gather, all_reduce, all_to_all
from autoshard.runtime.engine import NewWeights


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
    """Stands in for an INetworkDefinition: forwards everything, and records."""

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


_EXPECTED = {
    "all_reduce": ("ALL_REDUCE", "SUM"),
    "all_gather_into_tensor": ("ALL_GATHER", "NONE"),
    "reduce_scatter_tensor": ("REDUCE_SCATTER", "SUM"),
    "all_to_all_single": ("ALL_TO_ALL", "NONE"),
}


def check_collectives(spy: Spy, graph: RankGraph) -> None:
    """Raise ExportError unless the network has the graph's collectives, in order, each over all
    ranks of one group, reducing by sum."""
    nodes = [
        node
        for node in graph.module.graph.nodes
        if getattr(node.target, "namespace", "") == "_c10d_functional"
    ]
    wanted = [
        (*_EXPECTED[node.target._schema.name.split("::")[1]], -1, None, graph.tp) for node in nodes
    ]
    found = [recorded.arguments for recorded in spy.collectives]
    if len(found) != len(wanted):
        raise export_error(f"{len(found)} collectives in the network, {len(wanted)} in the graph")
    for node, want, have in zip(nodes, wanted, found, strict=True):
        if want != have:
            names = ("operation", "reduction", "root", "groups", "ranks")
            differ = [(n, w, h) for n, w, h in zip(names, want, have) if w != h]
            said = ", ".join(f"{n} {h!r}, not {w!r}" for n, w, h in differ)
            raise export_error(f"the network's collective has {said}", node)


class NetworkInterpreter:
    """One rank's network, callable: inputs by name -> outputs by name.

    network: as `make_network` made it with `spy`. axis: the ranks it communicates with, by a
    process group or in lockstep; None where the mesh has one rank.
    """

    def __init__(self, network: Network, spy: Spy, axis: Axis | None = None) -> None:
        trt, definition = network.trt, network.definition
        self.axis = axis
        self.lowering, self.constants = network.lowering, dict(network.lowering.constants)
        self.inputs = [definition.get_input(i) for i in range(definition.num_inputs)]
        self.outputs = [definition.get_output(i) for i in range(definition.num_outputs)]
        self.recorded = {one.layer.name: one for one in spy.collectives}
        self.classes = {name.lower(): getattr(trt, name) for name in dir(trt)}
        self.steps = self._ordered(definition, spy.attentions)

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

    def _ordered(self, definition: Any, attentions: Sequence[Any]) -> list[Any]:
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
        for one in attentions:
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
        readers = self._reads()
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

    def _reads(self) -> Counter[str]:
        """How often each value is read, outputs once more."""
        tensors = [t for _, _, reads, _ in self.steps for t in reads if t is not None]
        return Counter(tensor.name for tensor in [*tensors, *self.outputs])

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

    def __init__(self, network: Network, spy: Spy) -> None:
        super().__init__(network, spy)
        self.graph = network.lowering.graph

    def _collective(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
        return stand_in(self.recorded[layer.name].operation.lower(), x, self.graph)
