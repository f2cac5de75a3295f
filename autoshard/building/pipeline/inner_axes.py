"""The graph of one micro-batch on the axes inside of a stage: of one rank, before it is cut.

A micro-batch is a shard of the batch, laid out first. Its graph is planned on cp and then on tp
like any other (`first_axis.py`), and experts stay on ep. The graph of a rank is then cut: what a
stage sends is what its rank holds of a value, to the rank of its own place in the next stage. Only
dims are split that cp and tp divide, so that all ranks have graphs of the same shapes, and cuts.

Weights are whole on cp in that graph: they are gathered once a call, as on dp_shard, and not once a
micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import fx

from autoshard.building.first_axis import lay_out
from autoshard.building.pipeline.microbatch import MicrobatchGraph
from autoshard.config import Config
from autoshard.passes import ExchangeExperts, Localize, exchange, rank_program
from autoshard.planning import (
    Decisions,
    Plan,
    Request,
    plan_graph,
    strategy_text,
    value,
    with_graph,
)
from autoshard.planning.cost import Hardware
from autoshard.planning.estimate import Layout
from autoshard.runtime.collectives import Axis, State, data_states
from autoshard.runtime.graph_meta import OUTPUT_STATES
from autoshard.runtime.mesh import Mesh


def split_operators(
    microbatch: MicrobatchGraph,
    names: Mapping[fx.Node, str],
    stored: Mapping[fx.Node, State],
    axes: Sequence[Axis],
    machine: Hardware,
    config: Config,
    plan: Plan | None = None,
) -> tuple[MicrobatchGraph, Plan]:
    """The graph of this rank of `axes`, of one micro-batch, and the plan that it follows.

    names, stored: of the parameters by their placeholder in the serial graph: names, and the states
    on tp in which they are stored already. plan: one to follow. Raises PlanError where it cannot
    be, and ConfigError for a mixture of experts on a mesh with cp and ep.
    """
    mesh = Mesh(tuple(axes), None)
    made = plan or Plan(mesh.planned.name, mesh.planned.size)
    first = plan.outer if plan is not None else None
    if mesh.outer is not None:
        microbatch, first = _on_cp(microbatch, names, mesh, mesh.outer, machine, config, first)
    if mesh.planned.size > 1:
        microbatch, made = _on_tp(microbatch, names, stored, mesh, machine, config, plan)
    if mesh.axis("ep").size > 1:
        own = enumerate(microbatch.parameters)
        states = {i: data_states(value(node).dim(), mesh.axes) for i, node in own}
        exchange(microbatch.local, ExchangeExperts(mesh.axis("ep"), states), mesh.planned)
    return microbatch, replace(made, outer=first)


def _on_cp(
    microbatch: MicrobatchGraph,
    names: Mapping[fx.Node, str],
    mesh: Mesh,
    axis: Axis,
    machine: Hardware,
    config: Config,
    plan: Plan | None,
) -> tuple[MicrobatchGraph, Plan]:
    own = {node: names[parameter] for node, parameter in _parameters(microbatch).items()}
    local, outer, made = lay_out(microbatch.local, own, mesh, axis, config, machine, plan)
    return _planned(microbatch, local, outer.decisions, axis), made


def _on_tp(
    microbatch: MicrobatchGraph,
    names: Mapping[fx.Node, str],
    stored: Mapping[fx.Node, State],
    mesh: Mesh,
    machine: Hardware,
    config: Config,
    plan: Plan | None,
) -> tuple[MicrobatchGraph, Plan]:
    whole, axis, own = microbatch.local, mesh.planned, _parameters(microbatch)
    sizes = {one.name: one.size for one in mesh.axes}
    request = Request(
        axis=axis.name,
        parameters={node: names[parameter] for node, parameter in own.items()},
        stored={node: stored[p] for node, p in own.items() if p in stored},
        sequence_parallel=config.sequence_parallel,
        plan=plan,
        layout=Layout.of(sizes, config.zero, config.bucket_bytes),
        even=True,
    )
    decisions = plan_graph(whole, axis.size, machine, request)
    local, _ = rank_program(whole, [Localize(decisions, config.recompute_collectives)], axis)
    made = with_graph(plan, decisions, request, whole, axis.size)
    split = {parameter: decisions.stored[node] for node, parameter in own.items()}
    return replace(_planned(microbatch, local, decisions, axis), split=split), made


def _parameters(microbatch: MicrobatchGraph) -> dict[fx.Node, fx.Node]:
    """The parameters by their placeholder in the graph of a micro-batch; shared values are behind
    them."""
    placeholders = microbatch.local.graph.find_nodes(op="placeholder")
    return dict(zip(placeholders, microbatch.parameters))


def _planned(
    microbatch: MicrobatchGraph, local: fx.GraphModule, decisions: Decisions, axis: Axis
) -> MicrobatchGraph:
    lines = [
        f"{node.name} on {axis.name}: {strategy_text(one)}"
        for node, one in decisions.strategies.items()
    ]
    return replace(
        microbatch,
        local=local,
        shards=[(axis, list(local.meta[OUTPUT_STATES])), *microbatch.shards],
        plan=[*microbatch.plan, *lines],
    )
