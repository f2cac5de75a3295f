"""Program: one model, planned and rewritten for one rank, with everything one may ask of it."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autoshard.compiling import off_meta, reduce_in_place
from autoshard.config import Config
from autoshard.memory import (
    BUFFERS,
    OPTIMIZER,
    OPTIMIZERS,
    PARAMETERS,
    PENDING,
    Memory,
    Moment,
    Step,
    summary,
)
from autoshard.passes import (
    BUFFER,
    CHANGE,
    LINE,
    MODULE,
    PENDING_INPUTS,
    READER,
    READER_LINE,
    SILENT,
    Watch,
    finish,
    local_value,
    specialize,
)
from autoshard.planning import Decisions, Plan, tensor_bytes
from autoshard.planning.estimate import STORED
from autoshard.runtime.collectives import Axis, R, State, data_axes
from autoshard.runtime.compat import ForwardBackward, Lowered, forward_backward, inductor_graphs
from autoshard.runtime.mesh import Mesh
from autoshard.runtime.parameters import SINGLE

_c10d = torch.ops._c10d_functional
_LOGICAL_SIZE = {  # which tensor's bytes are the size of the collective: megatron's ledger
    _c10d.all_reduce.default: ("all_reduce", "input"),
    _c10d.all_gather_into_tensor.default: ("all_gather", "output"),
    _c10d.all_gather_into_tensor_coalesced.default: ("all_gather", "output"),
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


@dataclass
class Program:
    """What `autoshard.trace` returns and the backend builds, for one graph on one rank.

    graph_module: the local forward graph, state changes explicit (`autoshard.render` prints it).
    serial: the captured serial graph that was planned. plan: the plan, ready to `save`.
    parameters: name of each parameter by its placeholder in `serial`. axis: the planned one, tp.
    data: the state in which each is stored on the data-parallel axes; an absent one is R.
    microbatch: what backward does with gradients, one of `runtime.unshard.MICROBATCH`.
    chosen: where the mesh comes from, in a line; "" where the caller gave it.
    absent: trained parameters of the model that the graph does not read, where the model is known.
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
    microbatch: str = SINGLE
    chosen: str = ""
    absent: tuple[str, ...] = ()
    watch: Watch = field(default=SILENT, repr=False)

    @cached_property
    def joint(self) -> ForwardBackward:
        """The forward and backward ATen graphs AOTAutograd makes of `graph_module`."""
        fakes = [n.meta["val"] for n in self.graph_module.graph.nodes if n.op == "placeholder"]
        made = forward_backward(*off_meta(self.graph_module, fakes))
        finish(made.forward, self.mesh, self.config.bucket_bytes, False, self.watch)
        if made.backward is not None:
            finish(made.backward, self.mesh, self.config.bucket_bytes, True, self.watch)
        return made

    @cached_property
    def running(self) -> ForwardBackward:
        """`joint` as it is compiled and run: each collective the way its backend does it best."""
        graphs = (self.joint.forward, self.joint.backward)
        forward, backward = (gm and copy.deepcopy(gm) for gm in graphs)
        assert forward is not None
        specialize(forward, self.axis, False, self.watch)
        if backward is not None:
            specialize(backward, self.axis, True, self.watch)
        return replace(self.joint, forward=forward, backward=backward)

    def finish(self, graph: fx.GraphModule, backward: bool) -> None:
        """Bucket and schedule the collectives of a graph that is compiled and run, in place."""
        finish(graph, self.mesh, self.config.bucket_bytes, backward, self.watch)
        specialize(graph, self.axis, backward, self.watch)

    def settings(self) -> str:
        """What `finish` depends on besides the graph; equal texts make equal graphs of one."""
        options = replace(self.config, mesh={}, plan=None)
        return f"{self.mesh.axes} {options} {self.watch.key()}"

    def collectives(self) -> list[Collective]:
        """One entry a collective, forward then backward, in the order of issue."""
        found = []
        for phase, gm in (("forward", self.joint.forward), ("backward", self.joint.backward)):
            for node in gm.graph.nodes if gm is not None else ():
                if node.target in _LOGICAL_SIZE:
                    found.append(self._collective(node, phase))
        return found

    @cached_property
    def lowered(self) -> Lowered:
        """The graphs that Inductor gets to lower, after its own passes."""
        fakes = [n.meta["val"] for n in self.graph_module.graph.nodes if n.op == "placeholder"]
        made = inductor_graphs(*off_meta(self.graph_module, fakes), self.finish)
        if made.backward is not None:
            reduce_in_place(made.backward.graph)
        return made

    def memory(self, optimizer: str = "adamw", inner: str | None = None) -> Memory:
        """Bytes a rank holds in a training step; see `autoshard.memory.step.Memory`.

        optimizer: a key of `autoshard.memory.step.OPTIMIZERS`: "adamw" (one parameter at a time),
        "adamw_foreach", "adamw_fused", "momentum" (SGD with it) or "sgd". inner: what runs the
        graphs, None: the program's own; "inductor" stores what Inductor's code would store, others
        run operator by operator. Exact for what is stored between steps.
        """
        return summary(self._step(optimizer, inner))

    def memory_timeline(self, optimizer: str = "adamw", inner: str | None = None) -> list[Moment]:
        """What is alive while each operator of a step runs: forward, backward, then the update.
        Arguments as for `memory`; with Inductor an operator is listed where its value is stored."""
        return list(self._step(optimizer, inner).moments())

    def _step(self, optimizer: str, inner: str | None) -> Step:
        if optimizer not in OPTIMIZERS:
            raise ValueError(f"optimizer {optimizer!r} is none of {', '.join(OPTIMIZERS)}")
        kind = OPTIMIZERS[optimizer]
        parameters = buffers = 0
        trained, positions = [], set()
        placeholders = [n for n in self.serial.graph.nodes if n.op == "placeholder"]
        for i, node in enumerate(placeholders):
            if not isinstance(node.meta.get("val"), torch.Tensor):
                continue
            if node in self.parameters:
                positions.add(i)
                local = tensor_bytes(self._local(node))
                parameters += local
                trained += [local] if node.meta["val"].requires_grad else []
            elif node.meta.get(BUFFER):
                buffers += tensor_bytes(node.meta["val"])
        state = kind.states * sum(trained) + kind.counter * len(trained)
        waiting = self.graph_module.meta.get(PENDING_INPUTS, ())
        pending = sum(math.prod(each.shape) * each.dtype.itemsize for each in waiting)
        resident = {
            PARAMETERS: parameters, BUFFERS: buffers, OPTIMIZER: state, PENDING: pending
        }  # fmt: skip
        graphs = self.lowered if (inner or self.config.inner) == "inductor" else self.running
        return Step(graphs, positions, resident, sum(trained), kind.scratch(trained))

    def without_gradient(self) -> list[str]:
        """Trained parameters that this graph gives no gradient: read only where none is recorded,
        or not read at all (`absent`). No collective waits for them; `grad` stays None."""
        backward = self.joint.backward
        grads: Any = ()
        if backward is not None:
            grads = next(iter(reversed(backward.graph.nodes))).args[0]
        names = []
        for i, node in enumerate(n for n in self.serial.graph.nodes if n.op == "placeholder"):
            trained = node in self.parameters and node.meta["val"].requires_grad
            if trained and (i >= len(grads) or grads[i] is None):
                names.append(self.parameters[node])
        return [*names, *self.absent]

    def stored(self) -> dict[str, State]:
        """The stored state of each parameter on the axis."""
        return {name: self.decisions.stored[node] for node, name in self.parameters.items()}

    def explain(self, width: int | None = None) -> str:
        """The plan as text: by module, parameters with reasons, collectives by cost, alternatives.

        width: columns to use; None: the terminal's, or 100 where the output is no terminal.
        """
        from autoshard.explain import explain

        return explain(self, width)

    def explain_html(self, path: str | os.PathLike[str]) -> None:
        """Write the same, with the graph and the memory over a step, as one HTML page."""
        from autoshard.explain import write_page

        write_page(self, path)

    def _local(self, node: fx.Node) -> torch.Tensor:
        val = local_value(node.meta["val"], self.decisions.stored[node], self.axis)
        for axis in reversed(data_axes(self.mesh.axes)):
            val = local_value(val, self.data[node].get(axis.name, R), axis)
        dtype = node.meta.get(STORED, val.dtype)
        return val if dtype == val.dtype else torch.empty_like(val, dtype=dtype)

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
            sum(map(tensor_bytes, pytree.tree_leaves(source.meta["val"]))),
            phase,
            custom.get(MODULE, ""),
            custom.get(CHANGE, ""),
            custom.get(LINE, ""),
            node,
            custom.get(READER, ""),
            custom.get(READER_LINE, ""),
        )
