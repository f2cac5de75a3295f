"""The problem that a request asks for."""

from __future__ import annotations

import torch
from torch import fx

from autoshard.planning.asked import Request, expert_axis
from autoshard.planning.batch_axis import batch_axis
from autoshard.planning.cost import Machine
from autoshard.planning.outer import Origin
from autoshard.planning.prices import AxisPrices, Prices
from autoshard.planning.problem import Builder
from autoshard.planning.strategy import value
from autoshard.planning.values import shardable
from autoshard.runtime.collectives import I, State, shard_dim
from autoshard.runtime.errors import PlanError
from autoshard.runtime.graph_meta import DIFF, MUTATED, N_OUTPUTS


def builder_of(
    gm: fx.GraphModule,
    n: int,
    machine: Machine,
    request: Request,
    prices: Prices,
    contiguous: bool = False,
    origin: Origin | None = None,
) -> Builder:
    """The builder of the problem that a request asks for. origin: in place of `request.outer`'s."""
    stored: dict[fx.Node, State | None] = {}
    wanted = request.plan.parameters if request.plan else {}
    for node, name in request.parameters.items():
        stored[node] = request.stored.get(node) or _checked(node, name, wanted.get(name))
    results = list(gm.graph.output_node().args[0])  # type: ignore[arg-type]
    domains = _output_domains(gm, results, n, request)
    on_ep = expert_axis(gm, n, machine, request, prices.batch_second)
    axis = AxisPrices(
        n,
        machine,
        stored.keys(),
        request.sequence_parallel,
        prices,
        request.axis,
        fusing=request.fusing,
        batch=batch_axis(n, machine, request, prices.batch_second),
    )
    return Builder(
        gm,
        axis,
        stored=stored,
        arriving=request.arriving,
        output_domains=domains,
        outputs_read=request.outputs_read
        and not any(_is_loss(r) for r in results[: gm.meta[N_OUTPUTS]]),
        even=request.even,
        contiguous=contiguous,
        beside=request.beside,
        on_ep=on_ep,
        origin=origin or (request.outer.origin(gm) if request.outer else None),
    )


def may_be_sharded(gm: fx.GraphModule, i: int, result: object, request: Request) -> bool:
    """Whether output i may leave the graph as a shard."""
    if not request.lazy_outputs or i >= gm.meta[N_OUTPUTS] or not isinstance(result, fx.Node):
        return False
    return isinstance(value(result), torch.Tensor) and value(result).is_floating_point()


def _output_domains(
    gm: fx.GraphModule, results: list[object], n: int, request: Request
) -> list[list[State]]:
    """The states in which each output may leave: the user's free where they are lazy, what is
    written back to an input as it arrived."""
    domains = []
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    written = [request.arriving.get(placeholders[i], I) for i in gm.meta.get(MUTATED, ())]
    for i, result in enumerate(results):
        if may_be_sharded(gm, i, result, request):
            assert isinstance(result, fx.Node)
            domains.append([I, *shardable(value(result), n)])
        else:
            domains.append([I if i < gm.meta[N_OUTPUTS] else written[i - gm.meta[N_OUTPUTS]]])
    return domains


def _checked(node: fx.Node, name: str, state: State | None) -> State | None:
    shape = tuple(value(node).shape)
    dim = shard_dim(state) if state else None
    if dim is not None and dim >= len(shape):
        raise PlanError(
            f"the plan stores parameter {name!r} as {state}, but its shape is {shape}: "
            f"use I (Replicate) or S(0) to S({len(shape) - 1})"
        )
    return state


def _is_loss(result: object) -> bool:
    """A differentiable scalar: beside it, other outputs are probably not read."""
    return (
        isinstance(result, fx.Node)
        and isinstance(value(result), torch.Tensor)
        and value(result).dim() == 0
        and bool(result.meta.get(DIFF))
    )
