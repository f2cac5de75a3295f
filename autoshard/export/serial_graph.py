"""The captured serial graph of a model, for a reader: what is a parameter, what is a constant.

The graph is the one that is planned and sharded, whether the model's parameters are whole or
stored as shards: in both cases it has the shapes of the unsharded model. The parameters are read
here too, one at a time.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.distributed.tensor import DTensor

from autoshard.capture import capture, intercept
from autoshard.export.errors import ALONE, export_error
from autoshard.passes import Canonicalize, Context
from autoshard.runtime import compat
from autoshard.runtime.agreement import world_axis
from autoshard.runtime.collectives import Axis
from autoshard.runtime.mesh import axes_of
from autoshard.runtime.parameters import local_bounds, stored_states, unshard_parameter

SEQUENCE = 8
"""Length of the example sequence where the caller gives no example."""


@dataclass(frozen=True)
class ModelGraph:
    """A normalised serial graph, and what its placeholders are.

    parameters: name of each parameter by placeholder; a tied one has its first name. constants:
    value of each buffer by placeholder. The other placeholders are the caller's inputs.
    """

    module: fx.GraphModule
    parameters: Mapping[fx.Node, str]
    constants: Mapping[fx.Node, torch.Tensor]

    @property
    def nodes(self) -> Sequence[fx.Node]:
        return list(self.module.graph.nodes)


def unwrapped(model: nn.Module) -> nn.Module:
    """The user's module, where `model` is what torch.compile made of it."""
    return getattr(model, "_orig_mod", model)  # type: ignore[no-any-return]


def parameter_names(model: nn.Module) -> dict[int, str]:
    """First name of every parameter, by the id of the parameter."""
    return {id(p): name for name, p in unwrapped(model).named_parameters()}


def model_graph(
    model: nn.Module, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
) -> ModelGraph:
    """Capture `model(*args, **kwargs)` in eval mode; without an example, of a [1, 8] of token ids.

    The model is neither run nor changed. Raises what torch.compile(fullgraph=True) raises where
    the model breaks the graph, and CaptureError.
    """
    model = unwrapped(model)
    call = dict(kwargs or {})
    if not args and not call:
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        args = (torch.arange(SEQUENCE, device=device).unsqueeze(0),)
    if compat.uses_cache(model):
        call.setdefault("use_cache", False)  # a cache would become outputs
    names = parameter_names(model)

    def read(
        gm: fx.GraphModule, example_inputs: Sequence[Any], inputs: list[compat.GraphInput]
    ) -> ModelGraph:
        return _read(capture(gm, example_inputs), inputs, names)

    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        # the model may have been trained with batches of other shapes: sizes stay plain here
        return intercept(model, args, call, read, dynamic=False)
    finally:
        for module in training:
            module.training = True


def _read(
    gm: fx.GraphModule, inputs: list[compat.GraphInput], names: Mapping[int, str]
) -> ModelGraph:
    Canonicalize().run(gm, Context(Axis("tp", 1, 0, "")))
    parameters: dict[fx.Node, str] = {}
    constants: dict[fx.Node, torch.Tensor] = {}
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    for node, item in zip(placeholders, inputs, strict=True):
        if isinstance(item.real, nn.Parameter):
            name = names.get(id(item.real), item.name)
            parameters[node] = name
        elif item.real is not None and item.of_model:
            constants[node] = item.real
    for node in gm.graph.nodes:
        if node.op == "get_attr" and isinstance(
            value := getattr(gm, str(node.target)), torch.Tensor
        ):
            constants[node] = value
    return ModelGraph(gm, parameters, constants)


def scan_of(nodes: Iterable[fx.Node]) -> fx.Node | None:
    """A node of an associative scan, by which state-space models pass on their state; None where
    there is none. Capture has taken it apart, so that only the traces of its nodes tell."""
    return next(
        (n for n in nodes if "associative_scan(" in (n.meta.get("stack_trace") or "")), None
    )


Region = Callable[[tuple[int, ...]], list[tuple[int, int]]]
"""A region of a parameter that somebody will take: of the parameter's shape, for each dim the first
index that is needed and one past the last."""


def whole(shape: tuple[int, ...]) -> list[tuple[int, int]]:
    """All of a parameter, as a region."""
    return [(0, size) for size in shape]


@dataclass(frozen=True)
class Block:
    """A block of a parameter: the tensor, and the index in each dim at which it begins."""

    tensor: torch.Tensor
    starts: tuple[int, ...]


class WeightSource:
    """The parameters of a model in one process, or in a job of many.

    job: the processes that export together, all of the running world. A model without stored
    shards is exported by the process that calls, alone. gathered: names of parameters that had to
    be made whole, in order.
    """

    def __init__(self, model: nn.Module) -> None:
        self.parameters = dict(unwrapped(model).named_parameters())
        shared = any(isinstance(p, DTensor) for p in self.parameters.values())
        self.job = world_axis() if shared else ALONE
        self.gathered: list[str] = []
        buffers = dict(unwrapped(model).named_buffers())
        for kind, tensors in (("parameter", self.parameters), ("buffer", buffers)):
            for name, tensor in tensors.items():
                if tensor.is_meta:
                    raise export_error(
                        f"{kind} {name} is on the meta device: it has no values to write"
                    )

    def read(self, name: str, wanted: Sequence[Sequence[Region]]) -> Block:
        """What this rank holds of a parameter, where that is enough for every rank, else all of it.

        wanted: for each rank of the job, the regions it will take. Collective over the model's
        mesh where the parameter is sharded; at most this one parameter is whole at a time.
        """
        parameter = self.parameters[name]
        if not isinstance(parameter, DTensor):
            return Block(parameter.detach(), (0,) * parameter.dim())
        if all(
            _covers(self._bounds(parameter, rank), region(tuple(parameter.shape)))
            for rank, regions in enumerate(wanted)
            for region in regions
        ):
            starts = tuple(start for start, _ in self._bounds(parameter, self.job.rank))
            return Block(compat.local_of(parameter).detach(), starts)
        self.gathered.append(name)
        with torch.no_grad():
            return Block(unshard_parameter(parameter).detach(), (0,) * parameter.dim())

    @staticmethod
    def _bounds(parameter: DTensor, rank: int) -> list[tuple[int, int]]:
        """(first, one past the last) index of a rank's part, for each dim."""
        mesh, states = parameter.device_mesh, stored_states(parameter)
        place = (mesh.mesh == rank).nonzero()
        if len(place) == 0:
            return [(0, 0)] * parameter.dim()
        coordinates = place[0].tolist()
        axes = [
            Axis(axis.name, axis.size, coordinates[i], "") for i, axis in enumerate(axes_of(mesh))
        ]
        return local_bounds(parameter.shape, states, axes)


def _covers(held: list[tuple[int, int]], needed: list[tuple[int, int]]) -> bool:
    return all(
        low <= first and last <= high
        for (low, high), (first, last) in zip(held, needed, strict=True)
        if first < last
    )
