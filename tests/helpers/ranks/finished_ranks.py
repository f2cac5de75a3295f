"""The graphs that are compiled, after all passes, run on every rank in one process, in lockstep."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from autoshard.building.batch_check import batch_facts
from autoshard.building.one_rank import build_program
from autoshard.capture import intercept
from autoshard.config import Config
from autoshard.planning import Plan, Prices, Request, plan_graph, with_graph
from autoshard.planning.cost.clusters import cluster
from autoshard.planning.cost.machines import Link
from autoshard.program import Program
from autoshard.runtime.collectives import (
    FUSED_PRODUCTS,
    Axis,
    I,
    all_gather,
    all_reduce,
    all_to_all,
    gradient_value,
    run_ranks,
)
from autoshard.runtime.collectives.redistribution import reduce_scatter
from autoshard.runtime.graph_meta import N_OUTPUTS
from autoshard.runtime.mesh import offline_mesh
from autoshard.verification.program_check import Differences, join, split
from side_by_side import difference

_c10d = torch.ops._c10d_functional

H100 = cluster("h100")
_SLOWER = 1e-6
SLOW = replace(
    H100.on({}),
    device=replace(
        H100.device,
        name="slow",
        flops={kind: rate * _SLOWER for kind, rate in H100.device.flops.items()},
        memory_bandwidth=H100.device.memory_bandwidth * _SLOWER,
    ),
    links={
        name: Link(link.latency, link.bandwidth * _SLOWER, link.copy_bandwidth * _SLOWER)
        for name, link in H100.on({}).links.items()
    },
)
"""On it a small model takes as long as a large one, so that plans are those of large ones."""


class Layers(nn.Module):
    """Two layers with the products of a transformer's: q, k and v; o; gate and up; down."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm": nn.RMSNorm(width),
                    **{name: nn.Linear(width, width) for name in ("q", "k", "v")},
                    "o": nn.Linear(width, width, bias=False),
                    "after": nn.RMSNorm(width),
                    **{name: nn.Linear(width, 2 * width) for name in ("gate", "up")},
                    "down": nn.Linear(2 * width, width, bias=False),
                }
            )
            for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [batch, tokens, width]; the same."""
        for each in self.layers:
            h = each["norm"](x)
            x = x + each["o"](each["q"](h).tanh() * each["k"](h) + each["v"](h))
            h = each["after"](x)
            x = x + each["down"](each["gate"](h).relu() * each["up"](h))
        return x


def layers(
    model: nn.Module, shape: Sequence[int], dtype: torch.dtype | None = None
) -> tuple[Callable[..., Program], list[Any]]:
    """What makes a rank's program of a model on an input of that shape, of which the gradient is
    asked for too, and the values of the placeholders of its serial graph."""
    torch.compiler.reset()
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=dtype, requires_grad=True)
    found: tuple[Any, ...] = intercept(model, (x,), None, lambda *graph: graph, dynamic=False)

    def build(mesh: dict[str, int], rank: int = 0, **options: Any) -> Program:
        config = Config.from_options({"mesh": mesh, "inner": "aot_eager", **options})
        own, facts = offline_mesh(mesh, rank), batch_facts(found[2])
        return build_program(*found, own, config, H100, facts=facts)

    return build, [item.real for item in found[2]]


def megatron(build: Callable[..., Program], n: int, sequence: bool) -> Plan:
    """The plan of tensor parallelism, or of that and sequence parallelism, by whatever costs: of a
    small model the cheapest one may be another."""
    program = build({"tp": n})
    prices = Prices(1e-3, 10.0 / SLOW.device.memory_bandwidth if sequence else None, False)
    request = Request(parameters=program.parameters, sequence_parallel=sequence, prices=prices)
    decisions = plan_graph(program.serial, n, SLOW, request)
    return with_graph(None, decisions, request, program.serial, n)


class OnRank(fx.Interpreter):
    """A graph whose collectives of the planned axis are those of threads."""

    def __init__(self, gm: fx.GraphModule, axis: Axis) -> None:
        super().__init__(gm)
        self.axis = axis

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """A collective, a wait, or anything else."""
        axis = self.axis
        if target is _c10d.wait_tensor.default:
            return args[0]
        if target is _c10d.all_reduce.default:
            return all_reduce(args[0], args[1], axis)
        if target is _c10d.all_gather_into_tensor.default:
            return all_gather(args[0], axis)
        if target is _c10d.all_gather_into_tensor_coalesced.default:
            return [all_gather(one, axis) for one in args[0]]
        if target is _c10d.reduce_scatter_tensor.default:
            return reduce_scatter(args[0], axis)
        if target is _c10d.all_to_all_single.default:
            rows = [[args[0].shape[0] // axis.size] * axis.size] * axis.size
            return all_to_all(args[0], axis, rows)
        if target in FUSED_PRODUCTS:
            return target(*args[:-2], axis.rank, axis.group)
        return super().call_function(target, args, kwargs)


def worst_difference(
    build: Callable[..., Program], values: Sequence[Any], n: int, **options: Any
) -> tuple[float, str]:
    """Of outputs and gradients on `n` ranks of tp and in the serial graph, relative to the largest
    entry of each; with its name.

    build, values: as of `layers`.
    """
    programs = [build({"tp": n}, rank=rank, **options) for rank in range(n)]
    first, (outputs, given, grads) = programs[0], _serial(programs[0], values)
    states = first.decisions.outputs[: len(outputs)]
    tangents = [
        None if one is None else split(one, gradient_value(state), n)
        for one, state in zip(given, states)
    ]
    inputs = first.serial.graph.find_nodes(op="placeholder")
    stored = [first.decisions.stored.get(node, I) for node in inputs]
    parts = [
        split(value.detach(), state, n) if isinstance(value, torch.Tensor) else [value] * n
        for value, state in zip(values, stored)
    ]
    for program in programs:
        assert program.joint.backward is not None

    def run(axis: Axis) -> tuple[list[Any], list[Any]]:
        graphs = programs[axis.rank].joint
        assert graphs.backward is not None
        own = [part[axis.rank] for part in parts]
        made = OnRank(graphs.forward, axis).run(*own)
        noise = [one[axis.rank] for one in tangents if one is not None]
        kept = len(graphs.backward.graph.find_nodes(op="placeholder")) - len(noise)
        wanted = [*made[len(made) - kept :], *noise]
        with torch.no_grad():
            return made[: len(outputs)], list(OnRank(graphs.backward, axis).run(*wanted))

    with torch.no_grad():
        ranks = run_ranks(n, run)
    found = {}
    for i, (want, state) in enumerate(zip(outputs, states)):
        got = join([rank[0][i] for rank in ranks], "I" if state == "R" else state)
        found[f"output {i}"] = difference(got, want)
    for i, (want, state) in enumerate(zip(grads, stored)):
        name = first.parameters.get(inputs[i], inputs[i].name)
        parts = [rank[1][i] for rank in ranks]
        if want is not None:
            found[name] = difference(join(parts, gradient_value(state)), want)
        elif any(part is not None and part.any() for part in parts):
            found[name] = math.inf
    name, worst = Differences(found).worst
    return worst, name


def _serial(program: Program, values: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
    """Outputs, noise as their gradients, and the gradients of the inputs."""
    leaves = [
        value.detach().clone().requires_grad_(node.meta["val"].requires_grad)
        if isinstance(value, torch.Tensor)
        else value
        for value, node in zip(values, program.serial.graph.find_nodes(op="placeholder"))
    ]
    torch.manual_seed(0)
    outputs = list(program.serial(*leaves))[: program.serial.meta[N_OUTPUTS]]
    given = [torch.randn_like(one) if one.requires_grad else None for one in outputs]
    pairs = [(out, noise) for out, noise in zip(outputs, given) if noise is not None]
    torch.autograd.backward([out for out, _ in pairs], [noise for _, noise in pairs])
    grads = [getattr(leaf, "grad", None) for leaf in leaves]
    return [out.detach() for out in outputs], given, grads
