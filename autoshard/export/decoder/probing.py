"""What a part of a graph computes, found by running it on chosen values in float64.

Patterns of nodes differ between models that compute the same; values do not. The rows of a fused
and interleaved qkv weight that become query head 3, an activation, the frequencies of a rotary
embedding: each is read off the result of running the nodes in between on values that tell.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from autoshard.export.errors import export_error
from autoshard.export.serial_graph import ModelGraph

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
    for other in _between(node, given):
        if other in graph.constants:
            values[other] = _wide(graph.constants[other].detach().cpu())
            continue
        for operand in other.all_input_nodes:
            if operand in values or operand.op not in ("placeholder", "get_attr"):
                continue
            if operand not in graph.constants:
                name = graph.parameters.get(operand, operand.name)
                raise export_error(f"depends on {name}, which is not expected here", other)
            values[operand] = _wide(graph.constants[operand].detach().cpu())
        args = fx.node.map_arg(other.args, lambda n: values[n])
        kwargs = fx.node.map_arg(dict(other.kwargs), lambda n: values[n])
        try:
            values[other] = other.target(*_lift(args), **_lift(kwargs))  # type: ignore[operator]
        except (RuntimeError, TypeError) as error:
            raise export_error(f"cannot be evaluated: {error}", other) from error
    result: Tensor = values[node]
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


def frequencies(base: float, dim: int, scaling: Mapping[str, Any] | None) -> Tensor:
    """The `dim // 2` angles a rotary embedding turns by at position 1.

    scaling: None, {"rope_type": "linear", "factor"} or {"rope_type": "llama3", "factor",
    "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}, as in Hugging Face
    configurations. Raises ExportError for another type.
    """
    freq = base ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    kind = (scaling or {}).get("rope_type", (scaling or {}).get("type", "default"))
    if scaling is None or kind == "default":
        return freq
    if kind == "linear":
        return freq / scaling["factor"]
    if kind == "llama3":
        return _llama3(freq, scaling)
    raise export_error(f"rotary embeddings of type {kind!r} are not known to the exporter")


def angles(rotated: Callable[[Tensor], Tensor], dim: int) -> Tensor | None:
    """The angles at position 1 of the rotary embedding `rotated`, in the half-split convention.

    rotated: [dim] of an unrotated head -> [positions, dim]. Returns [dim // 2] angles, or None
    where it is no such rotation.
    """
    at_one = rotated(torch.ones(dim, dtype=torch.float64))[1]
    first, second = at_one.chunk(2)
    cos, sin = (first + second) / 2, (second - first) / 2
    x = torch.linspace(-1, 1, dim, dtype=torch.float64).square() + 0.25
    a, b = x.chunk(2)
    expected = torch.cat([a * cos - b * sin, b * cos + a * sin])
    if not _close(rotated(x)[1], expected) or not _close(cos**2 + sin**2, torch.ones_like(cos)):
        return None
    return torch.atan2(sin, cos)


def fitted_base(freq: Tensor, dim: int) -> float:
    """The base of which plain rotary frequencies are the powers, to six digits."""
    last = freq[-1].item()
    exponent = -(dim - 2) / dim
    return float(f"{last ** (1 / exponent):.6g}") if exponent else 10000.0


def _llama3(freq: Tensor, scaling: Mapping[str, Any]) -> Tensor:
    """Llama 3.1's interpolation: long waves slowed by `factor`, short ones kept."""
    original = scaling["original_max_position_embeddings"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = original * freq / (2 * math.pi)
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    result: Tensor = (1 - smooth) * freq / scaling["factor"] + smooth * freq
    return result


def _named(result: Tensor, expected: Callable[[Callable[[Tensor], Tensor]], Tensor]) -> str | None:
    for name, act in ACTIVATIONS.items():
        if _close(result, expected(act)):
            return name
    return None


def _close(left: Tensor, right: Tensor) -> bool:
    return left.shape == right.shape and torch.allclose(left, right, rtol=1e-5, atol=1e-6)


def _between(node: fx.Node, stop: Mapping[fx.Node, Any]) -> list[fx.Node]:
    """`node` and what it is computed from, back to `stop` and the placeholders, in order."""
    seen: set[fx.Node] = set()
    todo = [node]
    while todo:
        one = todo.pop()
        if one in seen or one in stop or one.op == "placeholder":
            continue
        seen.add(one)
        todo += one.all_input_nodes
    return sorted(seen)


def _wide(value: Any) -> Any:
    floating = isinstance(value, Tensor) and value.is_floating_point()
    return value.to(torch.float64) if floating else value


def _lift(arguments: Any) -> Any:
    """Arguments for float64 on the CPU: no cast loses digits, no value is on another device."""

    def lift(value: Any) -> Any:
        if isinstance(value, torch.dtype):
            return torch.float64 if value.is_floating_point else value
        if isinstance(value, torch.device):
            return torch.device("cpu")
        if isinstance(value, dict):
            return {key: lift(one) for key, one in value.items()}
        if type(value) in (list, tuple):
            return type(value)(map(lift, value))
        return value

    return lift(arguments)
