"""Run a program on every rank in one process and compare it with the serial graph.

The oracle is the serial graph on the same inputs, in the same precision: outputs, and the
gradient of every differentiable input, under random output gradients (which see more than the
gradient of one loss). Ranks run in lockstep threads, so no process group is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autoshard.passes.localize import Localize
from autoshard.program import Program
from autoshard.runtime.axis import Axis, chunk_bounds
from autoshard.runtime.lockstep import run_ranks
from autoshard.runtime.placement import (
    P,
    R,
    State,
    forward_value,
    gradient_value,
    shard_dim,
)


@dataclass
class Report:
    """Worst differences: outputs relative to the largest entry of the serial output, gradients
    relative to the largest entry of any serial gradient."""

    outputs: dict[str, float] = field(default_factory=dict)
    gradients: dict[str, float] = field(default_factory=dict)

    @property
    def worst(self) -> tuple[str, float]:
        """(name, difference) of the entry that is furthest off."""
        every = {**self.outputs, **self.gradients}
        return max(every.items(), key=lambda item: item[1], default=("nothing compared", 0.0))


def split(tensor: torch.Tensor, state: State, n: int) -> list[torch.Tensor]:
    """The local values of `tensor` on n ranks, in R, P (random parts) or S(d)."""
    if state == R:
        return [tensor.clone() for _ in range(n)]
    if state == P:
        noise = [torch.randn_like(tensor) for _ in range(n - 1)]
        return [*noise, tensor - sum(noise)] if noise else [tensor.clone()]
    dim = shard_dim(state)
    assert dim is not None
    bounds = [chunk_bounds(tensor.shape[dim], Axis("", n, rank, "")) for rank in range(n)]
    return [tensor.narrow(dim, start, length).clone() for start, length in bounds]


def join(parts: Sequence[torch.Tensor], state: State) -> torch.Tensor:
    """The whole value; ranks that should hold the same and do not are an AssertionError."""
    dim = shard_dim(state)
    if dim is not None:
        return torch.cat(list(parts), dim)
    if state == P:
        return torch.stack(list(parts)).sum(0)
    for part in parts[1:]:
        torch.testing.assert_close(part, parts[0], rtol=0, atol=0, equal_nan=True)
    return parts[0]


def verify_program(program: Program, inputs: Sequence[Any], *, seed: int = 0) -> Report:
    """Compare `program` on all ranks of its axis with its serial graph on `inputs`.

    inputs: one value a placeholder of `program.serial`, whole and real.
    """
    n = program.axis.size
    serial, decisions = program.serial, program.decisions
    placeholders = [node for node in serial.graph.nodes if node.op == "placeholder"]
    n_outputs = serial.meta["n_outputs"]

    whole = [_leaf(v, node) for v, node in zip(inputs, placeholders, strict=True)]
    torch.manual_seed(seed)
    expected = list(serial(*whole))[:n_outputs]
    grads = [torch.randn_like(out) if _has_grad(out) else None for out in expected]
    _backward(expected, grads)

    shards = [
        split(v.detach(), decisions.stored.get(node, R), n)
        if isinstance(v, torch.Tensor)
        else [v] * n
        for v, node in zip(inputs, placeholders, strict=True)
    ]
    states = decisions.outputs[:n_outputs]
    grad_parts = [
        None if g is None else split(g, gradient_value(s), n) for g, s in zip(grads, states)
    ]

    def program_of(axis: Axis) -> fx.GraphModule:
        return Localize(serial, decisions, axis).run()

    def rank(axis: Axis, local: fx.GraphModule) -> tuple[list[Any], list[Any]]:
        values = [_leaf(shard[axis.rank], node) for shard, node in zip(shards, placeholders)]
        outputs = list(local(*values))
        _backward(outputs, [None if g is None else g[axis.rank] for g in grad_parts])
        return outputs, [getattr(v, "grad", None) for v in values]

    torch.manual_seed(seed)  # the ranks draw what the serial graph drew
    results = run_ranks(n, rank, name=program.axis.name, prepare=program_of)
    report = Report()
    for i, (out, state) in enumerate(zip(expected, states)):
        if isinstance(out, torch.Tensor):
            got = join([r[0][i].detach() for r in results], forward_value(state))
            report.outputs[f"output {i}"] = _difference(got, out.detach())
    # Some gradients are zero but for rounding (a key's bias under softmax): the yardstick is the
    # largest gradient of the model.
    largest = max(
        (float(v.grad.abs().max()) for v in whole if getattr(v, "grad", None) is not None),
        default=0.0,
    )
    for i, (value, node) in enumerate(zip(whole, placeholders)):
        grad = getattr(value, "grad", None)
        if grad is None:
            continue
        state = gradient_value(decisions.stored.get(node, R))
        name = program.parameters.get(node, node.name)
        parts = [r[1][i] for r in results]
        assert all(p is not None for p in parts), f"{name}: no gradient on some rank"
        report.gradients[name] = _difference(join(parts, state), grad, largest)
    return report


def _leaf(value: Any, node: fx.Node) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    leaf = value.detach().clone()
    return leaf.requires_grad_(bool(node.meta["val"].requires_grad))


def _has_grad(out: Any) -> bool:
    return isinstance(out, torch.Tensor) and out.requires_grad


def _backward(outputs: Sequence[Any], grads: Sequence[torch.Tensor | None]) -> None:
    pairs = [(o, g) for o, g in zip(outputs, grads) if g is not None]
    if pairs:
        torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])


def _difference(got: torch.Tensor, want: torch.Tensor, scale: float | None = None) -> float:
    if got.shape != want.shape or got.dtype != want.dtype:
        raise AssertionError(f"got {got.shape} {got.dtype}, serial has {want.shape} {want.dtype}")
    if not want.is_floating_point():
        return float((got != want).any())
    if scale is None:
        scale = float(want.abs().max()) if want.numel() else 0.0
    return float((got - want).abs().max()) / max(scale, 1e-30) if want.numel() else 0.0
