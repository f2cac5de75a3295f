"""What data-parallel ranks compare, whose batches differ: options, parameters, and constants.

They may compile at different times, and different graphs where their batches have different shapes.
So they compare only when the parameters of a graph are about to be stored, which all do together,
and when parameters have been frozen or freed.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakTensorKeyDictionary

from autoshard.building.batch_check import batch_shapes
from autoshard.planning import target_name, value
from autoshard.program import Program
from autoshard.runtime import compat
from autoshard.runtime.agreement import agree, gather
from autoshard.runtime.collectives import data_axes
from autoshard.runtime.mesh import Mesh
from autoshard.runtime.parameters import models_of

# Which device of its kind a rank uses, its place on an axis, and where an object lies, are its own
# affair.
_OF_THIS_PROCESS = re.compile(
    r":\d+(?=['\"])|(?: object)? at 0x[0-9a-f]+|, index=\d+|, rank=\d+, group='[^']*'"
)

_trained: Any = WeakTensorKeyDictionary()
"""`requires_grad` of each parameter when a graph that reads it was last built."""


def agree_on_data_axes(
    mesh: Mesh,
    serial: fx.GraphModule,
    names: Mapping[fx.Node, str],
    options: Sequence[str],
    inputs: Sequence[compat.GraphInput],
    new: bool,
) -> None:
    """Raise PlanMismatchError on all ranks where those of a data-parallel axis differ.

    names: of the parameters of the serial graph. options: lines about them, `program_options`.
    new: whether parameters of the graph are about to be stored. Constants are compared whole where
    the ranks' graphs have the same operators and inputs of the same shapes; where not, those that
    modules hold as attributes (`eps`), because others may be made of a batch's sizes.
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
        lines = [*options, *_lines_of_parameters(inputs)]
        nodes = [node_line(node, names) for node in serial.graph.nodes]
        operators = [f"{node.op} {target_name(node)}" for node in serial.graph.nodes]
        for axis in axes:
            own = [shapes, digest_of(operators)]
            alike = all(each == own for each in gather(own, f"plan ({note})", axis))
            compared = lines + (nodes if alike else _lines_of_modules(serial, parameters))
            agree("plan", digest_of(compared), compared, axis, note=note)
    for parameter in parameters:
        _trained[parameter] = parameter.requires_grad


def digest_of(lines: Sequence[str]) -> str:
    """A hash of the lines."""
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def node_line(node: fx.Node, parameters: Mapping[fx.Node, str]) -> str:
    """A node of a serial graph with its constants, shape and dtype."""
    val = value(node)
    shape = f" {tuple(val.shape)} {val.dtype}" if isinstance(val, torch.Tensor) else ""
    given = f"{node.args}" if node.op == "call_function" else ""
    given += "".join(f" {name}={each}" for name, each in {**node.kwargs, **_defaults(node)}.items())
    args = _OF_THIS_PROCESS.sub("", given)
    return f"{node.op} {parameters.get(node, node.name)}{args}{shape}"


def program_options(program: Program) -> list[str]:
    """The options of a program, as lines to compare."""
    chosen = program.decisions.recomputation
    again = [] if chosen is None else sorted(chosen.again)
    sent = [] if chosen is None else sorted(chosen.sent)
    return [
        f"gradients: {program.microbatch}",
        *program.config.lines(),
        f"losses by chunks: {', '.join(loss_lines(program)) or 'none'}",
        f"computed again, in the memory there is: {', '.join(again) or 'nothing'}",
        f"on the host, in the memory there is: {', '.join(sent) or 'nothing'}",
    ]


def loss_lines(program: Program) -> list[str]:
    """The losses that go by chunks."""
    return [node.name for node, one in program.decisions.losses.items() if one.chunked]


def _lines_of_parameters(inputs: Sequence[compat.GraphInput]) -> list[str]:
    return [
        f"parameter {item.name}: {tuple(item.real.shape)} {item.real.dtype}, "
        f"requires_grad {item.real.requires_grad}"
        for item in inputs
        if isinstance(item.real, nn.Parameter)
    ]


def _lines_of_modules(serial: fx.GraphModule, parameters: Sequence[nn.Parameter]) -> list[str]:
    """The attributes of the model's modules that are constants of the graph."""
    constants = set(_floats(serial.graph))
    lines = {
        f"{type(module).__name__}.{name} = {each!r}"
        for model in models_of(list(parameters))
        for module in model.modules()
        for name, each in vars(module).items()
        if type(each) is float and each in constants
    }
    return sorted(lines)


def _floats(graph: fx.Graph) -> Iterator[Any]:
    for node in graph.nodes:
        for each in pytree.tree_leaves((node.args, node.kwargs, _defaults(node))):
            if type(each) is float:
                yield each


def _defaults(node: fx.Node) -> dict[str, float]:
    """The floats that a node leaves to its operator: `eps` of a norm."""
    schema = getattr(node.target, "_schema", None)
    absent = () if schema is None else schema.arguments[len(node.args) :]
    return {
        a.name: a.default_value
        for a in absent
        if type(a.default_value) is float and a.name not in node.kwargs
    }
