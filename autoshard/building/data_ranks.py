"""What data-parallel ranks compare, whose batches differ: options, parameters, and constants.

They may compile at different times, and different graphs where their batches have different shapes.
So they compare only when the parameters of a graph are about to be stored, which all do together,
and when parameters have been frozen or freed.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from typing import Any

from torch import fx, nn
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakTensorKeyDictionary

from autoshard.building.batch_check import batch_shapes
from autoshard.building.compared import Compared, default_floats, digest_of, lines_of
from autoshard.runtime import compat
from autoshard.runtime.agreement import agree, gather
from autoshard.runtime.collectives import data_axes
from autoshard.runtime.mesh import Mesh
from autoshard.runtime.parameters import models_of

_trained: Any = WeakTensorKeyDictionary()
"""`requires_grad` of each parameter when a graph that reads it was last built."""


def agree_on_data_axes(
    mesh: Mesh,
    serial: fx.GraphModule,
    own: Compared,
    inputs: Sequence[compat.GraphInput],
    new: bool,
) -> None:
    """Raise PlanMismatchError on all ranks where those of a data-parallel axis differ.

    new: whether parameters of the graph are about to be stored. Constants are compared whole where
    the ranks' graphs have the same operators and inputs of the same shapes; where not, those that
    modules hold as attributes (`eps`), because others may be made of a batch's sizes, and the
    parameters of the whole model: a rank may have taken another branch.
    """
    parameters = [item.real for item in inputs if isinstance(item.real, nn.Parameter)]
    changed = [
        item.name
        for item in inputs
        if isinstance(item.real, nn.Parameter)
        and _trained.get(item.real, item.real.requires_grad) != item.real.requires_grad
    ]
    axes = data_axes(mesh.axes)
    if axes and (new or changed):
        shapes = batch_shapes(inputs)
        note = f"{shapes}; requires_grad of {changed[0]} was set" if changed else shapes
        for axis in axes:
            graph = [shapes, digest_of(own.operators), sorted(set(_floats(serial.graph)))]
            given = gather(graph, f"plan ({note})", axis)
            if all(each[:2] == graph[:2] for each in given):
                lines = [*own.job, *own.parameters, *own.nodes]
            else:
                floats = {constant for _, _, constants in given for constant in constants}
                lines = [*own.job, *_lines_of_models(models_of(parameters), floats)]
            agree("plan", digest_of(lines), lines, axis, note=note)
    for parameter in parameters:
        _trained[parameter] = parameter.requires_grad


def _lines_of_models(models: Sequence[nn.Module], constants: Container[float]) -> list[str]:
    """The parameters of models, and the attributes of their modules that are among constants."""
    parameters = {name: one for model in reversed(models) for name, one in model.named_parameters()}
    attributes = {
        f"{type(module).__name__}.{name} = {each!r}"
        for model in models
        for module in model.modules()
        for name, each in vars(module).items()
        if type(each) is float and each in constants
    }
    return [*lines_of(parameters), *sorted(attributes)]


def _floats(graph: fx.Graph) -> Iterator[Any]:
    for node in graph.nodes:
        for each in pytree.tree_leaves((node.args, node.kwargs, default_floats(node))):
            if type(each) is float:
                yield each
