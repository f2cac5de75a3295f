"""Run a program on every rank in one process and compare it with the serial graph.

The oracle is the serial graph on the same inputs, in the same precision: outputs, and the
gradient of every differentiable input, under random output gradients (which see more than the
gradient of one loss). Ranks run in lockstep threads, so no process group is needed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autoshard.passes import N_OUTPUTS, DataParallel, Localize, Pass, rank_program
from autoshard.program import Program
from autoshard.runtime.collectives import (
    Axis,
    P,
    R,
    State,
    chunk_bounds,
    data_axes,
    forward_value,
    gradient_value,
    run_mesh,
    shard_dim,
)
from autoshard.runtime.mesh import Mesh, data_coordinate
from autoshard.runtime.parameters import local_part, owned

_SEED = torch.ops.autoshard.random_seed.default


@dataclass
class Report:
    """Worst differences: outputs relative to the largest entry of the serial output, gradients
    relative to the largest entry of any serial gradient. norms: of each gradient, the norm of the
    difference relative to its own norm, or to a hundredth of the largest norm."""

    outputs: dict[str, float] = field(default_factory=dict)
    gradients: dict[str, float] = field(default_factory=dict)
    norms: dict[str, float] = field(default_factory=dict)

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


def verify_program(
    program: Program,
    inputs: Sequence[Any],
    *,
    seed: int = 0,
    others: Sequence[Sequence[Any]] = (),
) -> Report:
    """Compare `program` on all ranks of its mesh with its serial graph on `inputs`.

    inputs: one value a placeholder of `program.serial`, whole and real; on a mesh with
    data-parallel axes those of its first rank, and `others` has as many for each further one
    (their parameters are not read). Random numbers of data-parallel ranks, which draw apart,
    need processes of their own: ValueError.
    """
    serial, decisions = program.serial, program.decisions
    placeholders = [node for node in serial.graph.nodes if node.op == "placeholder"]
    n_outputs = serial.meta[N_OUTPUTS]
    states = decisions.outputs[:n_outputs]
    batches = [
        [v if node in program.parameters else own for v, own, node in zip(inputs, b, placeholders)]
        for b in (inputs, *others)
    ]
    sizes = _mesh_sizes(program)
    tp = sizes["tp"]
    ranks = math.prod(sizes.values()) // tp
    if len(batches) != ranks:
        raise ValueError(f"{ranks} data-parallel ranks need as many batches, not {len(batches)}")
    if ranks > 1 and any(n.target is _SEED for n in serial.graph.nodes):
        raise ValueError("threads cannot draw apart: verify this model in processes")

    serial_runs = []
    for values in batches:
        whole = [_leaf(v, node) for v, node in zip(values, placeholders, strict=True)]
        torch.manual_seed(seed)
        expected = list(serial(*whole))[:n_outputs]
        grads = [torch.randn_like(out) if _has_grad(out) else None for out in expected]
        _backward(expected, grads)
        serial_runs.append((whole, expected, grads))
    grad_parts = [
        [None if g is None else split(g, gradient_value(s), tp) for g, s in zip(grads, states)]
        for _, _, grads in serial_runs
    ]

    def stored(node: fx.Node) -> dict[str, State]:
        return {program.axis.name: decisions.stored.get(node, R), **program.data.get(node, {})}

    def program_of(axes: tuple[Axis, ...]) -> fx.GraphModule:
        passes: list[Pass] = [Localize(decisions)]
        spread = {i: program.data[n] for i, n in enumerate(placeholders) if n in program.data}
        if ranks > 1:
            passes.append(DataParallel(data_axes(axes), spread))
        return rank_program(serial, passes, axes[-1])[0]

    def rank(axes: tuple[Axis, ...], local: fx.GraphModule) -> tuple[list[Any], list[Any]]:
        axis = axes[-1]
        index = data_coordinate(Mesh(axes, None))
        values = [
            _leaf(owned(local_part(v, stored(node), axes)), node)
            if isinstance(v, torch.Tensor)
            else v
            for v, node in zip(batches[index], placeholders)
        ]
        outputs = list(local(*values))
        _backward(outputs, [None if g is None else g[axis.rank] for g in grad_parts[index]])
        return outputs, [getattr(v, "grad", None) for v in values]

    torch.manual_seed(seed)  # the ranks draw what the serial graph drew
    results = run_mesh(sizes, rank, prepare=program_of)
    lines = [results[index * tp : (index + 1) * tp] for index in range(ranks)]
    report = Report()
    for own, (_, expected, _) in enumerate(serial_runs):
        for i, (out, state) in enumerate(zip(expected, states)):
            if isinstance(out, torch.Tensor):
                got = join([r[0][i].detach() for r in lines[own]], forward_value(state))
                name = f"output {i}" if ranks == 1 else f"output {i} of data rank {own}"
                report.outputs[name] = _difference(got, out.detach())
    data_states = [[program.data.get(node, {}).get(name, R) for name in sizes if name != "tp"]
                   for node in placeholders]
    wanted = _serial_gradients(program, placeholders, [whole for whole, _, _ in serial_runs])
    # Some gradients are zero but for rounding (a key's bias under softmax): the yardstick is the
    # largest gradient of the model, or a hundredth of the largest norm.
    largest = max((float(g.abs().max()) for g in wanted.values() if g.numel()), default=0.0)
    floor = 1e-2 * max((float(g.norm()) for g in wanted.values()), default=0.0)
    for (i, index), want in wanted.items():
        node = placeholders[i]
        name = program.parameters.get(node, node.name)
        on_tp = gradient_value(decisions.stored.get(node, R))
        if index is None:
            parts = [r[1][i] for r in results]
            line_sizes, line_states = list(sizes.values()), [*data_states[i], on_tp]
        else:
            parts, line_sizes, line_states = [r[1][i] for r in lines[index]], [tp], [on_tp]
            name += f" of data rank {index}" if ranks > 1 else ""
        assert all(p is not None for p in parts), f"{name}: no gradient on some rank"
        got = _join_mesh(parts, line_sizes, line_states)
        report.gradients[name] = _difference(got, want, largest)
        report.norms[name] = float((got - want).norm()) / max(float(want.norm()), floor, 1e-30)
    return report


def _mesh_sizes(program: Program) -> dict[str, int]:
    """By name, tp last; a mesh without it has one of size 1."""
    sizes = {axis.name: axis.size for axis in program.mesh.axes}
    return {**sizes, program.axis.name: sizes.get(program.axis.name, 1)}


def _join_mesh(
    parts: Sequence[torch.Tensor], sizes: Sequence[int], states: Sequence[State]
) -> torch.Tensor:
    """The whole of what each rank holds; outer axes, which were split last, are joined first."""
    for size, state in zip(sizes, states, strict=True):
        stride = len(parts) // size
        parts = [join(parts[first::stride], state) for first in range(stride)]
    return parts[0]


def _serial_gradients(
    program: Program, placeholders: Sequence[fx.Node], runs: Sequence[Sequence[Any]]
) -> dict[tuple[int, int | None], torch.Tensor]:
    """By placeholder and data-parallel rank: of a parameter, whose rank is None, the mean."""
    found: dict[tuple[int, int | None], torch.Tensor] = {}
    for i, node in enumerate(placeholders):
        grads = {index: getattr(whole[i], "grad", None) for index, whole in enumerate(runs)}
        there = {index: g for index, g in grads.items() if g is not None}
        if node in program.parameters and there:
            found[i, None] = torch.stack(list(there.values())).sum(0) / len(runs)
        elif there:
            found.update({(i, index): g for index, g in there.items()})
    return found


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
