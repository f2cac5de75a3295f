"""What a part of a graph computes, found by running it on chosen values in float64; which values
are a parameter, whatever swaps, casts and copies are between.

Patterns of nodes differ between models that compute the same; values do not. The rows of a fused
and interleaved qkv weight that become query head 3, an activation, the frequencies of a rotary
embedding: each is read off the result of running the nodes in between on values that tell.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from autoshard.export.errors import export_error
from autoshard.export.serial_graph import ModelGraph
from autoshard.passes import permutation
from autoshard.planning import reached

aten = torch.ops.aten

SWAPS = (aten.permute.default, aten.transpose.int, aten.t.default, aten.numpy_T.default)
MOVES = (aten._to_copy.default, aten.detach.default, aten.alias.default, aten.clone.default)


def parameter_of(graph: ModelGraph, node: object) -> tuple[fx.Node, bool] | None:
    """(placeholder, whether its last two dims are swapped) of a value that is a parameter."""
    swapped = False
    while isinstance(node, fx.Node):
        if node in graph.parameters:
            return node, swapped
        if node.target in SWAPS:
            rank = node.meta["val"].dim()
            if rank < 2 or permutation(node) != [*range(rank - 2), rank - 1, rank - 2]:
                return None
            swapped = not swapped
        elif node.target not in MOVES:
            return None
        node = node.args[0]
    return None


def moved(node: object) -> object:
    """The value behind casts and copies."""
    while isinstance(node, fx.Node) and node.target in MOVES:
        node = node.args[0]
    return node


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}
"""Elementwise functions by the name `activation` and `gated_activation` give them."""


def sources(node: fx.Node, stop: Mapping[fx.Node, Any]) -> list[fx.Node]:
    """The nodes of `stop` that `node` reads, directly or through others, in graph order."""
    found = {operand for other in _between(node, stop) for operand in other.all_input_nodes}
    return sorted(found & stop.keys()) if node not in stop else [node]


def evaluate(graph: ModelGraph, node: fx.Node, given: Mapping[fx.Node, Tensor]) -> Tensor:
    """The value of `node` where the nodes of `given` have these values; floats are float64.

    Raises ExportError where it depends on a parameter or an input that is not given.
    """
    values: dict[fx.Node, Any] = dict(given)
    reader = node

    def value(one: fx.Node) -> Any:
        if one in graph.constants and one not in values:
            values[one] = _wide(graph.constants[one].detach().cpu())
        if one in values:
            return values[one]
        if one.op == "get_attr":  # the forward and backward of an autograd.Function
            return getattr(graph.module, str(one.target))
        name = graph.parameters.get(one, one.name)
        raise export_error(f"depends on {name}, which is not expected here", reader)

    for reader in _between(node, given):
        if reader.op == "get_attr":
            continue
        args, kwargs = fx.node.map_arg((reader.args, dict(reader.kwargs)), value)
        args, kwargs = pytree.tree_map(_lift, (args, kwargs))
        try:
            values[reader] = reader.target(*args, **kwargs)  # type: ignore[operator]
        except (RuntimeError, TypeError) as error:
            raise export_error(f"cannot be evaluated: {error}", reader) from error
    result: Tensor = value(node)
    return result


def activation(function: Callable[[Tensor], Tensor]) -> str | None:
    """The name in ACTIVATIONS of an elementwise function, or None."""
    x = torch.linspace(-6, 6, 64, dtype=torch.float64)
    return _named(function(x), lambda act: act(x))


def gated_activation(function: Callable[[Tensor, Tensor], Tensor]) -> tuple[str, int] | None:
    """(name, which argument is activated) of `act(a) * b` or `a * act(b)`, or None."""
    a = torch.linspace(-6, 6, 64, dtype=torch.float64)
    b = torch.linspace(1, 3, 64, dtype=torch.float64).roll(17)
    result = function(a, b)
    for index, (gate, up) in enumerate(((a, b), (b, a))):
        name = _named(result, lambda act, gate=gate, up=up: act(gate) * up)  # type: ignore[misc]
        if name is not None:
            return name, index
    return None


def _named(result: Tensor, expected: Callable[[Callable[[Tensor], Tensor]], Tensor]) -> str | None:
    for name, act in ACTIVATIONS.items():
        if close(result, expected(act)):
            return name
    return None


def close(left: Tensor, right: Tensor, tolerance: float = 1e-5) -> bool:
    """Whether two values are the same but for rounding, relative to the larger."""
    same = left.shape == right.shape
    return same and torch.allclose(left, right, rtol=tolerance, atol=tolerance / 10)


def _between(node: fx.Node, stop: Mapping[fx.Node, Any]) -> list[fx.Node]:
    """`node` and what it is computed from, back to `stop` and the placeholders, in order."""

    def inside(nodes: Iterable[fx.Node]) -> list[fx.Node]:
        return [one for one in nodes if one not in stop and one.op != "placeholder"]

    return sorted(reached(inside([node]), lambda one: inside(one.all_input_nodes)))


def _wide(value: Any) -> Any:
    floating = isinstance(value, Tensor) and value.is_floating_point()
    return value.to(torch.float64) if floating else value


def _lift(argument: Any) -> Any:
    """An argument for float64 on the CPU: no cast loses digits, no value is on another device."""
    if isinstance(argument, torch.dtype):
        return torch.float64 if argument.is_floating_point else argument
    return torch.device("cpu") if isinstance(argument, torch.device) else argument
