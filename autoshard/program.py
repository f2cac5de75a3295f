"""Program: one model, planned and rewritten for one rank, with everything one may ask of it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import fx

from autoshard.config import Config
from autoshard.passes.base import SILENT, Watch
from autoshard.passes.localize import local_value
from autoshard.passes.pipeline import finish
from autoshard.planning.plan import Plan
from autoshard.planning.planner import Decisions
from autoshard.planning.values import tensor_bytes
from autoshard.runtime import compat
from autoshard.runtime.axis import Axis
from autoshard.runtime.data_axes import data_axes
from autoshard.runtime.mesh import Mesh
from autoshard.runtime.placement import R, State

_c10d = torch.ops._c10d_functional
_LOGICAL_SIZE = {  # which tensor's bytes are the size of the collective: megatron's ledger
    _c10d.all_reduce.default: ("all_reduce", "input"),
    _c10d.all_gather_into_tensor.default: ("all_gather", "output"),
    _c10d.reduce_scatter_tensor.default: ("reduce_scatter", "input"),
    _c10d.all_to_all_single.default: ("all_to_all", "input"),
    _c10d.broadcast.default: ("broadcast", "input"),
}


@dataclass(frozen=True)
class Collective:
    """One collective of a rank's step.

    bytes is the logical size: the tensor of an all-reduce or all-to-all, the output of an
    all-gather, the input of a reduce-scatter. phase is "forward" or "backward". module is the
    path of the module it serves, change the state change that causes it, stack the user's line.
    reader, reader_line: the module and the line that need the new state, where they are known.
    """

    op: str
    axis: str
    bytes: int
    phase: str
    module: str
    change: str
    stack: str
    node: fx.Node = field(repr=False, compare=False)
    reader: str = ""
    reader_line: str = ""


@dataclass(frozen=True)
class Memory:
    """Bytes one rank holds, by kind. `optimizer` assumes the two moments of Adam in the
    parameter's dtype; `activations` are what the forward saves for the backward."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    buffers: int

    @property
    def total(self) -> int:
        """The sum of all kinds."""
        return (
            self.parameters + self.gradients + self.optimizer + self.activations + self.buffers
        )


@dataclass
class Program:
    """What `autoshard.trace` returns and the backend builds, for one graph on one rank.

    graph_module: the local forward graph, state changes explicit (`autoshard.render` prints it).
    serial: the captured serial graph that was planned. plan: the plan, ready to `save`.
    parameters: name of each parameter by its placeholder in `serial`. axis: the planned one, tp.
    data: the state in which each is stored on the data-parallel axes; an absent one is R.
    watch: follows the passes that are still to come.
    """

    graph_module: fx.GraphModule
    serial: fx.GraphModule
    plan: Plan
    decisions: Decisions
    axis: Axis
    parameters: Mapping[fx.Node, str]
    mesh: Mesh
    data: Mapping[fx.Node, Mapping[str, State]]
    config: Config
    watch: Watch = field(default=SILENT, repr=False)

    @cached_property
    def joint(self) -> compat.ForwardBackward:
        """The forward and backward ATen graphs AOTAutograd makes of `graph_module`."""
        fakes = [n.meta["val"] for n in self.graph_module.graph.nodes if n.op == "placeholder"]
        made = compat.forward_backward(self.graph_module, fakes)
        self.finish(made.forward, False)
        if made.backward is not None:
            self.finish(made.backward, True)
        return made

    def finish(self, graph: fx.GraphModule, backward: bool) -> None:
        """Bucket and schedule the collectives of one of AOTAutograd's graphs, in place."""
        finish(graph, self.mesh, self.config, backward, self.watch)

    def collectives(self) -> list[Collective]:
        """One entry a collective, forward then backward, in the order of issue."""
        found = []
        for phase, gm in (("forward", self.joint.forward), ("backward", self.joint.backward)):
            for node in gm.graph.nodes if gm is not None else ():
                if node.target in _LOGICAL_SIZE:
                    found.append(self._collective(node, phase))
        return found

    def memory(self) -> Memory:
        """Bytes a rank; exact for parameters, gradients and buffers."""
        parameters = gradients = buffers = 0
        for node in self.serial.graph.nodes:
            if node.op != "placeholder" or not isinstance(node.meta.get("val"), torch.Tensor):
                continue
            if node in self.parameters:
                local = tensor_bytes(self._local(node))
                parameters += local
                gradients += local if node.meta["val"].requires_grad else 0
            elif node.meta.get("buffer"):
                buffers += tensor_bytes(node.meta["val"])
        saved = sum(tensor_bytes(n.meta["val"]) for n in self.joint.saved)
        return Memory(parameters, gradients, 2 * gradients, saved, buffers)

    def stored(self) -> dict[str, State]:
        """The stored state of each parameter on the axis."""
        return {name: self.decisions.stored[node] for node, name in self.parameters.items()}

    def explain(self, width: int | None = None) -> str:
        """The plan as text: by module, parameters with reasons, collectives by cost, alternatives.

        width: columns to use; None: the terminal's, or 100 where the output is no terminal.
        """
        from autoshard.report import explain

        return explain(self, width)

    def explain_html(self, path: str | os.PathLike[str]) -> None:
        """Write the same, with the graph and the memory over a step, as one HTML page."""
        from autoshard.page import write_page

        write_page(self, path)

    def _local(self, node: fx.Node) -> torch.Tensor:
        val = local_value(node.meta["val"], self.decisions.stored[node], self.axis)
        for axis in reversed(data_axes(self.mesh.axes)):
            val = local_value(val, self.data[node].get(axis.name, R), axis)
        return val

    def _axis_of(self, node: fx.Node) -> str:
        """The axis whose process group the collective names, in its last argument."""
        names = {axis.group: axis.name for axis in self.mesh.axes}
        return names[str(node.args[-1])]

    def _collective(self, node: fx.Node, phase: str) -> Collective:
        op, side = _LOGICAL_SIZE[node.target]  # type: ignore[index]
        source = node.args[0] if side == "input" else node
        assert isinstance(source, fx.Node)
        custom: dict[str, Any] = node.meta.get("custom") or {}
        return Collective(
            op,
            self._axis_of(node),
            tensor_bytes(source.meta["val"]),
            phase,
            custom.get("autoshard_module", ""),
            custom.get("autoshard_change", ""),
            custom.get("autoshard_line", ""),
            node,
            custom.get("autoshard_reader", ""),
            custom.get("autoshard_reader_line", ""),
        )
