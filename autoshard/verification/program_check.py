"""Run a program on every rank in one process and compare it with the serial graph.

The oracle is the serial graph on the same inputs, in the same precision: outputs, and the
gradient of every differentiable input, under random output gradients (which see more than the
gradient of one loss). Ranks run in lockstep threads, so no process group is needed.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import fx

from autoshard.passes import (
    ChunkLoss,
    DataParallel,
    ExchangeExperts,
    FuseInferenceLayers,
    Localize,
    Pass,
    rank_program,
)
from autoshard.planning import gathered_stacks, on_rank
from autoshard.program import Program
from autoshard.runtime.collectives import (
    Axis,
    I,
    P,
    State,
    chunk_bounds,
    forward_value,
    gathering_axes,
    gradient_value,
    head_tail,
    in_order,
    is_head_tail,
    outer_axis,
    run_mesh,
    shard_dim,
)
from autoshard.runtime.graph_meta import N_OUTPUTS, WITHHELD
from autoshard.runtime.mesh import Mesh, data_coordinate
from autoshard.runtime.parameters import local_part, owned
from autoshard.verification.comparison import difference, finite, furthest, largest, norm

_SEED = torch.ops.autoshard.random_seed.default


@dataclass
class Differences:
    """The worst differences between a program and its serial graph.

    outputs: relative to the largest entry of the serial output. gradients: relative to the largest
    entry of any serial gradient. norms: of each gradient, the norm of the difference relative to
    its own norm, or to a hundredth of the largest norm.
    """

    outputs: dict[str, float] = field(default_factory=dict)
    gradients: dict[str, float] = field(default_factory=dict)
    norms: dict[str, float] = field(default_factory=dict)

    @property
    def worst(self) -> tuple[str, float]:
        """(name, difference) of the entry that is furthest off; infinite where nothing was
        compared."""
        return _worst({**self.outputs, **self.gradients})

    @property
    def worst_by_norm(self) -> tuple[str, float]:
        """The same, of outputs and `norms`."""
        return _worst({**self.outputs, **self.norms})


def _worst(found: dict[str, float]) -> tuple[str, float]:
    every = found or {"nothing compared": math.inf}
    return max(every.items(), key=lambda item: furthest([item[1]]))


def split(tensor: torch.Tensor, state: State, n: int) -> list[torch.Tensor]:
    """The local values of `tensor` on n ranks, in I, P (random parts), S(d) or Z(d)."""
    if state == I:
        return [tensor.clone() for _ in range(n)]
    if state == P:
        noise = [torch.randn_like(tensor) for _ in range(n - 1)]
        return [*noise, tensor - sum(noise)] if noise else [tensor.clone()]
    dim = shard_dim(state)
    assert dim is not None
    if is_head_tail(state):
        tensor = head_tail(tensor, dim, n)
    bounds = [chunk_bounds(tensor.shape[dim], Axis("", n, rank, "")) for rank in range(n)]
    return [tensor.narrow(dim, start, length).clone() for start, length in bounds]


def join(parts: Sequence[torch.Tensor], state: State) -> torch.Tensor:
    """The whole value; ranks that should hold the same and do not are an AssertionError."""
    dim = shard_dim(state)
    if dim is not None:
        whole = torch.cat(list(parts), dim)
        return in_order(whole, dim, len(parts)) if is_head_tail(state) else whole
    if state == P:
        return torch.stack(list(parts)).sum(0)
    for part in parts[1:]:
        torch.testing.assert_close(part, parts[0], rtol=0, atol=0, equal_nan=True)
    return parts[0]


class _Run(NamedTuple):
    """One forward and backward: the values of the placeholders, the outputs, and what the outputs
    were given as their gradients."""

    values: list[Any]
    outputs: list[Any]
    given: list[torch.Tensor | None]


def verify_program(
    program: Program, inputs: Sequence[Any], *, seed: int = 0, others: Sequence[Sequence[Any]] = ()
) -> Differences:
    """Compare `program` on all ranks of its mesh with its serial graph on `inputs`.

    inputs: one value a placeholder of `program.serial`, whole and real; on a mesh with
    data-parallel axes those of its first rank, and `others` has as many for each further one
    (their parameters are not read). Random numbers of data-parallel ranks, which draw apart,
    need processes of their own: ValueError.
    """
    placeholders = [node for node in program.serial.graph.nodes if node.op == "placeholder"]
    sizes, data_ranks = _mesh_sizes(program), program.mesh.batches
    if len(others) + 1 != data_ranks:
        raise ValueError(
            f"{data_ranks} data-parallel ranks need as many batches, not {len(others) + 1}"
        )
    if data_ranks > 1 and any(n.target is _SEED for n in program.serial.graph.nodes):
        raise ValueError("threads cannot draw apart: verify this model in processes")
    batches = [
        [v if node in program.parameters else own for v, own, node in zip(inputs, b, placeholders)]
        for b in (inputs, *others)
    ]
    serial = [_serial_run(program, placeholders, batch, seed) for batch in batches]
    # once, for all ranks: the parts of a gradient that is to be summed are random
    given = [
        [
            None
            if whole is None
            else _split_over(program, whole, [gradient_value(state) for state in states])
            for whole, states in zip(run.given, _output_states(program))
        ]
        for run in serial
    ]
    torch.manual_seed(seed)  # the ranks draw what the serial graph drew
    ranks = run_mesh(
        sizes,
        lambda axes, graph: _rank_run(program, placeholders, batches, given, axes, graph),
        prepare=lambda axes: _rank_graph(program, placeholders, axes),
    )
    found = Differences()
    _compare_outputs(found, program, serial, ranks)
    _compare_gradients(found, program, placeholders, serial, ranks)
    return found


def _serial_run(
    program: Program, placeholders: Sequence[fx.Node], batch: Sequence[Any], seed: int
) -> _Run:
    """The serial graph on one batch, under noise as the gradients of its outputs."""
    values = [_leaf(v, node) for v, node in zip(batch, placeholders, strict=True)]
    torch.manual_seed(seed)
    outputs = list(program.whole(*values))[: program.serial.meta[N_OUTPUTS]]
    for i in program.graph_module.meta.get(WITHHELD, ()):
        outputs[i] = None
    has_grad = [isinstance(out, torch.Tensor) and out.requires_grad for out in outputs]
    given = [torch.randn_like(out) if has else None for out, has in zip(outputs, has_grad)]
    _backward(outputs, given)
    return _Run(values, outputs, given)


def _rank_graph(
    program: Program, placeholders: Sequence[fx.Node], axes: tuple[Axis, ...]
) -> fx.GraphModule:
    """The graph that a rank runs, over axes that are threads."""
    passes: list[Pass] = [Localize(program.decisions), FuseInferenceLayers()]
    passes += ChunkLoss.of(program.decisions.losses)
    spread = {i: program.data[n] for i, n in enumerate(placeholders) if n in program.data}
    if any(axis.size > 1 for axis in axes[:-1]):
        passes.append(DataParallel(gathering_axes(axes), spread))
        outer = outer_axis(axes)
        strategies = program.decisions.strategies
        gathered = gathered_stacks(program.serial, strategies)
        ep = [axis for axis in axes if axis.name == "ep"]
        passes += [ExchangeExperts(axis, spread, outer, gathered) for axis in ep]
    graph = rank_program(program.serial, passes, axes[-1])[0]
    if (outer := outer_axis(axes)) is not None:
        on_rank(graph, outer)
    return graph


def _rank_run(
    program: Program,
    placeholders: Sequence[fx.Node],
    batches: Sequence[Sequence[Any]],
    given: Sequence[Sequence[list[torch.Tensor] | None]],
    axes: tuple[Axis, ...],
    graph: fx.GraphModule,
) -> _Run:
    """A rank's graph on its part of the values, under its part of the gradients of the outputs."""
    mesh = Mesh(axes, None)
    index, rank = data_coordinate(mesh), 0
    for axis in mesh.sharing:
        rank = rank * axis.size + axis.rank
    values = []
    for value, node in zip(batches[index], placeholders):
        if isinstance(value, torch.Tensor):
            on_tp = program.decisions.stored.get(node, I)
            stored = {program.axis.name: on_tp, **program.data.get(node, {})}
            value = _leaf(owned(local_part(value, stored, axes)), node)
        values.append(value)
    outputs = list(graph(*values))
    own = [None if parts is None else parts[rank] for parts in given[index]]
    _backward(outputs, own)
    return _Run(values, outputs, own)


def _compare_outputs(
    found: Differences, program: Program, serial: Sequence[_Run], ranks: Sequence[_Run]
) -> None:
    shared = len(ranks) // len(serial)
    for index, run in enumerate(serial):
        group = ranks[index * shared : (index + 1) * shared]
        for i, (want, states) in enumerate(zip(run.outputs, _output_states(program))):
            if isinstance(want, torch.Tensor):
                parts = [rank.outputs[i].detach() for rank in group]
                sizes = [axis.size for axis in program.mesh.sharing]
                got = _join_mesh(parts, sizes, list(map(forward_value, states)))
                name = f"output {i}" if len(serial) == 1 else f"output {i} of data rank {index}"
                found.outputs[name] = _difference(got, want.detach())


def _compare_gradients(
    found: Differences,
    program: Program,
    placeholders: Sequence[fx.Node],
    serial: Sequence[_Run],
    ranks: Sequence[_Run],
) -> None:
    sizes, shared = _mesh_sizes(program), len(ranks) // len(serial)
    wanted = _serial_gradients(program, placeholders, [run.values for run in serial])
    # Some gradients are zero but for rounding (a key's bias under softmax): the yardstick is the
    # largest gradient of the model, or a hundredth of the largest norm.
    finites = [finite(g) for g in wanted.values()]
    scale = max(map(largest, finites), default=0.0)
    floor = 1e-2 * max(map(norm, finites), default=0.0)
    for (i, index), want in wanted.items():
        node = placeholders[i]
        name = program.parameters.get(node, node.name)
        states = [gradient_value(program.decisions.stored.get(node, I))]
        if index is None:
            held, lengths = ranks, list(sizes.values())
            data = program.data.get(node, {})
            states = [*(data.get(name, I) for name in sizes if name != program.axis.name), *states]
        else:
            held = ranks[index * shared : (index + 1) * shared]
            lengths = [axis.size for axis in program.mesh.sharing]
            states = [I] * (len(lengths) - 1) + states  # the caller's tensors are whole on cp
            name += f" of data rank {index}" if len(serial) > 1 else ""
        parts: list[Any] = [getattr(rank.values[i], "grad", None) for rank in held]
        assert all(part is not None for part in parts), f"{name}: no gradient on some rank"
        got = _join_mesh(parts, lengths, states)
        found.gradients[name] = _difference(got, want, scale)
        yardstick = max(norm(finite(want)), floor, 1e-30)
        found.norms[name] = norm(difference(got, want)) / yardstick
    for i, node in enumerate(placeholders):
        for r, rank in enumerate(ranks):
            grad = getattr(rank.values[i], "grad", None)
            index = None if node in program.parameters else r // shared
            if grad is not None and (i, index) not in wanted and grad.any():
                name = program.parameters.get(node, node.name)
                found.gradients[name] = found.norms[name] = math.inf  # the serial graph has none


def _mesh_sizes(program: Program) -> dict[str, int]:
    """By name, the planned axis last; a mesh without it has one of size 1."""
    sizes = program.mesh.sizes
    planned = sizes.pop(program.axis.name, 1)
    return {**sizes, program.axis.name: planned}


def _output_states(program: Program) -> list[list[State]]:
    """The states of each of the user's outputs on those axes."""
    on = [program.decisions.outputs]
    if program.outer is not None:
        on.insert(0, program.outer.decisions.outputs)
    return [list(states) for states in zip(*on)]


def _split_over(
    program: Program, whole: torch.Tensor, states: Sequence[State]
) -> list[torch.Tensor]:
    """The local values of `whole` on all ranks that have one batch, in their order."""
    parts = [whole]
    for axis, state in zip(program.mesh.sharing, states, strict=True):
        parts = [own for part in parts for own in split(part, state, axis.size)]
    return parts


def _join_mesh(
    parts: Sequence[torch.Tensor], sizes: Sequence[int], states: Sequence[State]
) -> torch.Tensor:
    """The whole of what each rank holds. Outer axes, which split parameters last, are joined first;
    of activations, whose dims differ, the order does not matter."""
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


def _backward(outputs: Sequence[Any], grads: Sequence[torch.Tensor | None]) -> None:
    pairs = [(o, g) for o, g in zip(outputs, grads) if g is not None]
    if pairs:
        torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])


def _difference(got: torch.Tensor, want: torch.Tensor, scale: float | None = None) -> float:
    if got.shape != want.shape or got.dtype != want.dtype:
        raise AssertionError(f"got {got.shape} {got.dtype}, serial has {want.shape} {want.dtype}")
    if scale is None:
        exact = not (want.is_floating_point() or want.is_complex())
        scale = 1.0 if exact else largest(finite(want))
    return largest(difference(got, want)) / max(scale, 1e-30)
