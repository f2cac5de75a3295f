"""Placeholders of a graph by what they stand for, and the ports of an engine that they become."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn

from autoshard.export.errors import export_error
from autoshard.export.rank_graph.graph import Port, RankWeight
from autoshard.export.spec import DIMS
from autoshard.runtime import compat
from autoshard.runtime.collectives import State


@dataclass(frozen=True)
class Placeholders:
    """The placeholders of a serial graph, by name.

    inputs: the name of each of the caller's inputs. weights: the name of each parameter.
    constants: the value of each other tensor of the model. sizes: by symbol instead, the name of
    the dynamic dim that it is the size of.
    """

    inputs: Mapping[str, str]
    weights: Mapping[str, str]
    constants: Mapping[str, torch.Tensor]
    sizes: Mapping[str, str]

    def rename(
        self, module: fx.GraphModule, serial: Sequence[fx.Node], stored: Mapping[fx.Node, State]
    ) -> tuple[dict[str, RankWeight], dict[str, torch.Tensor]]:
        """The weights and constants of a rank's graph, by the names that its placeholders get.

        serial: the placeholders of the serial graph, in the order of those of `module`; stored:
        the state of each parameter. Tensors that the graph holds become placeholders too.
        """
        weights: dict[str, RankWeight] = {}
        constants: dict[str, torch.Tensor] = {}
        new = list(module.graph.find_nodes(op="placeholder"))
        for node, like in zip(new, serial, strict=True):
            if like.name in self.inputs:
                node.target = self.inputs[like.name]
            elif like.name in self.weights:
                node.target = f"weight_{len(weights)}"
                val = like.meta["val"]
                weights[node.target] = RankWeight(
                    self.weights[like.name], tuple(val.shape), stored[like], val.dtype
                )
            elif like.name in self.constants:
                node.target = f"constant_{len(constants)}"
                constants[node.target] = self.constants[like.name]
            else:
                node.target = f"size_{like.name}"  # inputs tell it, and `tidy` drops it
        last = new[-1]
        for node in module.graph.find_nodes(op="get_attr"):
            value = getattr(module, str(node.target))
            if not isinstance(value, torch.Tensor):
                raise export_error(f"is a {type(value).__name__}, not a tensor", node)
            name = f"constant_{len(constants)}"
            constants[name] = value.detach().cpu()
            with module.graph.inserting_after(last):
                last = module.graph.placeholder(name)
            last.meta = dict(node.meta)
            node.replace_all_uses_with(last)
            module.graph.erase_node(node)
        return weights, constants

    def port(self, node: fx.Node, role: str, name: str | None = None) -> Port:
        """The port of a node's tensor. name: None for that of the placeholder `node`."""
        val = node.meta["val"]
        return Port(name or str(node.target), val.dtype, tuple(map(self._size, val.shape)), role)

    def _size(self, extent: Any) -> int | str:
        if isinstance(extent, int):
            return extent
        return re.sub(r"\bs\d+\b", lambda m: self.sizes.get(m[0], m[0]), str(extent))

    def output_ports(self, module: fx.GraphModule, caches: Mapping[str, str]) -> tuple[Port, ...]:
        """The ports of what the graph returns. caches: role of each cache, of those at the end."""
        results: Any = module.graph.output_node().args[0]
        own = results[: len(results) - len(caches)]
        ports = []
        for i, node in enumerate(own):
            if not isinstance(node, fx.Node) or not isinstance(node.meta["val"], torch.Tensor):
                raise export_error(f"output {i} of the model is no tensor")
            ports.append(self.port(node, "output", "logits" if len(own) == 1 else f"output_{i}"))
        for node, (name, role) in zip(results[len(own) :], caches.items()):
            ports.append(self.port(node, role, name))
        return tuple(replace(port, output=True) for port in ports)


def read_placeholders(
    nodes: Sequence[fx.Node],
    inputs: Sequence[compat.GraphInput],
    names: Mapping[int, str],
    arguments: Collection[int],
    values: Mapping[int, torch.Tensor],
) -> Placeholders:
    """What the placeholders `nodes` of a captured graph stand for; `inputs` are Dynamo's.

    By the id of a tensor: names of the parameters; arguments, those of the call; values, the
    user's tensor where the traced one is a copy without memory.
    """
    ports: dict[str, str] = {}
    weights: dict[str, str] = {}
    constants: dict[str, torch.Tensor] = {}
    sizes: dict[str, str] = {}
    for node, item in zip(nodes, inputs, strict=True):
        if isinstance(item.real, nn.Parameter):
            weights[node.name] = names.get(id(item.real), item.name)
        elif item.real is not None and id(item.real) not in arguments:
            value = values.get(id(item.real), item.real)
            constants[node.name] = value.detach().to("cpu", item.real.dtype)
        elif item.real is not None:
            ports[node.name] = re.findall(r"\['(\w+)'\]", item.source)[-1]
            for dim, extent in zip(DIMS, item.fake.shape):
                if not isinstance(extent, int):
                    sizes.setdefault(str(extent), dim)
    return Placeholders(ports, weights, constants, sizes)
