"""What a network computes, on the CPU: every layer in torch, all ranks in lockstep.

It reads the network that TensorRT holds, not the converter's intentions, and every value it
computes must have the type and the known sizes that TensorRT inferred. A collective does what its
recorded arguments say: with a wrong reduction the numbers are wrong, with one rank it does nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from graphlib import TopologicalSorter
from typing import Any

import torch

from autoshard.export.errors import export_error
from autoshard.export.rank_graph import stand_in
from autoshard.export.to_tensorrt.build import Network, Spy
from autoshard.export.to_tensorrt.converters import DTYPES, QUANTIZED_DTYPES
from autoshard.export.to_tensorrt.interpreted_layers import LAYERS, attend, unpacked
from autoshard.runtime.collectives import Axis, all_gather, all_reduce, all_to_all
from autoshard.runtime.engine import NewWeights


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

    def _collective(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
        operation = self.recorded[layer.name].operation.lower()
        return stand_in(operation, x, self.lowering.graph)
