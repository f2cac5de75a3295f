"""Built: the data of one model, planned and rewritten for one rank, and its AOT graphs.

A graph traced on the meta device, as if it had been traced on the CPU.

On meta, attention has no fused kernel: AOTAutograd would differentiate its slow form, which keeps
every attention matrix, and predict the memory of a program that nobody runs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import fx

from autoshard.compiling.inductor_order import hold_order
from autoshard.compiling.repeats import traced
from autoshard.config import Config
from autoshard.passes import (
    SILENT,
    FuseCollectives,
    Report,
    Watch,
    after_cut,
    finish,
    local_value,
    set_fate,
    specialize,
)
from autoshard.planning import Decisions, Outer, Plan, Recomputation
from autoshard.planning.cost import Machine
from autoshard.runtime.collectives import Axis, I, State, gathering_axes
from autoshard.runtime.compat import (
    FakeTensor,
    ForwardBackward,
    InductorStep,
    JointGraph,
    forward_backward,
    inductor_step,
)
from autoshard.runtime.graph_meta import STORED_DTYPE
from autoshard.runtime.mesh import Mesh
from autoshard.runtime.parameters import SINGLE

aten = torch.ops.aten


def off_meta(gm: fx.GraphModule, fakes: Sequence[Any]) -> tuple[fx.GraphModule, list[Any]]:
    """`gm` and its inputs, with CPU in the place of meta; themselves where nothing is on meta.

    fakes: one an input, of one fake mode; the new ones are of the same.
    """
    if not any(isinstance(fake, FakeTensor) and fake.is_meta for fake in fakes):
        return gm, list(fakes)
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    for node in list(graph.nodes):
        node.args = fx.node.map_aggregate(node.args, _elsewhere)
        node.kwargs = fx.node.map_aggregate(node.kwargs, _elsewhere)
        if node.target is aten.histc.default:  # on a CPU it counts floating numbers only
            with graph.inserting_before(node):
                source = graph.call_function(
                    aten._to_copy.default, node.args[:1], {"dtype": torch.float32}
                )
            node.args = (source, *node.args[1:])
    return fx.GraphModule(gm, graph), [_moved(fake) for fake in fakes]


def _elsewhere(argument: Any) -> Any:
    is_meta = isinstance(argument, torch.device) and argument.type == "meta"
    return torch.device("cpu") if is_meta else argument


def _moved(fake: Any) -> Any:
    if not isinstance(fake, FakeTensor) or not fake.is_meta:
        return fake
    with fake.fake_mode:
        moved = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device="cpu")
    return moved.requires_grad_(fake.requires_grad)


@dataclass(kw_only=True)
class Built:
    """A graph, planned and rewritten for one rank of a mesh.

    graph_module: the local forward graph, state changes explicit (`autoshard.render` prints it).
    serial: the captured serial graph that was planned. plan: the plan, ready to `save`.
    parameters: name of each parameter by its placeholder in `serial`. axis: the planned one, tp.
    outer: where cp was planned before it: `serial` is then the graph of a rank of cp.
    data: the state in which each is stored on the data-parallel axes; an absent one is I.
    microbatch: what backward does with gradients, one of `runtime.parameters.MICROBATCH`.
    chosen: where the mesh comes from, in a line; "" where the caller gave it.
    absent: trained parameters of the model that the graph does not read, where the model is known.
    watch: follows the passes that are still to come. reports: of those over the graphs of `joint`.
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
    outer: Outer | None = None
    watch: Watch = field(default=SILENT, repr=False)
    reports: list[Report] = field(default_factory=list, repr=False)

    @property
    def whole(self) -> fx.GraphModule:
        """The graph as it was captured, on no axis."""
        return self.serial if self.outer is None else self.outer.serial

    @property
    def machine(self) -> Machine:
        """The machine that the plan is for."""
        return self.decisions.machine

    @cached_property
    def joint(self) -> ForwardBackward:
        """The forward and backward ATen graphs AOTAutograd makes of `graph_module`."""
        gm, fakes = self._on_cpu()
        made = traced(gm, lambda short: forward_backward(gm, fakes, after_cut, short=short))
        return self._bucketed(made)

    @cached_property
    def running(self) -> ForwardBackward:
        """`joint` as it is compiled and run: each collective the way its backend does it best."""
        graphs = (self.joint.forward, self.joint.backward)
        forward, backward = (gm and copy.deepcopy(gm) for gm in graphs)
        assert forward is not None
        return self._specialized(replace(self.joint, forward=forward, backward=backward))

    def choices(self) -> Callable[[Recomputation], ForwardBackward]:
        """What makes `running` of a choice of what is recomputed, AOTAutograd run once for all."""
        joints: list[JointGraph] = []
        gm, fakes = self._on_cpu()
        traced(gm, lambda short: forward_backward(gm, fakes, after_cut, joints, short))

        def split(chosen: Recomputation) -> ForwardBackward:
            made = joints[0].split(lambda node: set_fate(node, chosen))
            return self._specialized(self._bucketed(made))

        return split

    def _bucketed(self, made: ForwardBackward) -> ForwardBackward:
        reports = self._finish(made.forward, False)
        if made.backward is not None:
            reports += self._finish(made.backward, True)
        self.reports[:] = reports
        return made

    def _finish(self, graph: fx.GraphModule, backward: bool) -> list[Report]:
        fuse = self.fusing(backward)
        return finish(graph, self.mesh, self.config.bucket_bytes, backward, self.watch, fuse)

    def fusing(self, backward: bool) -> FuseCollectives | None:
        """The pass that joins collectives to products, where the plan was priced with it."""
        fusing = self.decisions.prices.fusing
        if fusing is None or self.axis.size == 1:
            return None
        link = self.machine.real_links[self.axis.name]
        return FuseCollectives(fusing, self.machine, link, backward)

    def _specialized(self, made: ForwardBackward) -> ForwardBackward:
        specialize(made.forward, self.axis, False, self.watch)
        if made.backward is not None:
            specialize(made.backward, self.axis, True, self.watch)
        return made

    @cached_property
    def inductor(self) -> InductorStep | None:
        """Buffers of the code that Inductor generates; None where this torch cannot say."""
        return inductor_step(*self._on_cpu(), after_cut, self.finish, hold_order)

    def finish(self, graph: fx.GraphModule, backward: bool) -> None:
        """Bucket and schedule the collectives of a graph that is compiled and run, in place."""
        self._finish(graph, backward)
        specialize(graph, self.axis, backward, self.watch)

    def settings(self) -> str:
        """Text of all that `finish` depends on besides the graph: equal texts make equal graphs."""
        options = replace(self.config, mesh={}, plan=None)
        fusing = self.fusing(False)  # the only pass there that reads this rank's number
        many = [axis for axis in self.mesh.axes if axis.size > 1]
        axes = many if fusing else [axis._replace(rank=0) for axis in many]
        return f"{axes} {options} {fusing} {self.watch.key()}"

    def stored(self) -> dict[str, State]:
        """The stored state of each parameter on the axis."""
        return {name: self.decisions.stored[node] for node, name in self.parameters.items()}

    def stored_value(self, node: fx.Node) -> torch.Tensor:
        """A fake of this rank's part of a parameter, as stored, on the graph's device."""
        val = local_value(node.meta["val"], self.decisions.stored[node], self.axis)
        for axis in reversed(gathering_axes(self.mesh.axes)):
            val = local_value(val, self.data[node].get(axis.name, I), axis)
        dtype = node.meta.get(STORED_DTYPE, val.dtype)
        return val if dtype == val.dtype else torch.empty_like(val, dtype=dtype)

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

    def _on_cpu(self) -> tuple[fx.GraphModule, list[Any]]:
        """The local graph and its inputs, on no meta device."""
        fakes = [n.meta["val"] for n in self.graph_module.graph.nodes if n.op == "placeholder"]
        return off_meta(self.graph_module, fakes)
