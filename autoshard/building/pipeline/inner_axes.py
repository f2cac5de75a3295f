"""The graph of one micro-batch on the axes inside of a stage: of one rank, before it is cut.

A micro-batch is a shard of the batch, laid out first. Its graph is planned on cp and then on tp
like any other (`first_axis.py`), and experts stay on ep, unless `ep_exchange` is "weights". The
graph of a rank is then cut: what a stage sends is what its rank holds of a value, to the rank of
its own place in the next stage. Only dims are split that cp and tp divide, so that all ranks have
graphs of the same shapes, and cuts.

Weights are whole on cp in that graph: they are gathered once a call, as on dp_shard, and not once a
micro-batch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import torch
from torch import fx

from autoshard.building.first_axis import lay_out
from autoshard.building.pipeline.microbatch import MicrobatchGraph, PlannedMicrobatch
from autoshard.config import Config
from autoshard.errors import ConfigError
from autoshard.passes import SILENT, ExchangeExperts, Localize, Watch, exchange, rank_program
from autoshard.planning import (
    Decisions,
    Plan,
    Request,
    gathered_stacks,
    is_mixture,
    is_trained,
    plan_graph,
    producer,
    value,
    value_text,
    with_graph,
)
from autoshard.planning.cost import Machine
from autoshard.planning.estimate import Layout, Training
from autoshard.runtime.collectives import Axis, State, data_states, forward_value
from autoshard.runtime.graph_meta import OUTPUT_STATES, VALUE
from autoshard.runtime.mesh import Mesh


def split_operators(
    microbatch: MicrobatchGraph,
    names: Mapping[fx.Node, str],
    stored: Mapping[fx.Node, State],
    axes: Sequence[Axis],
    machine: Machine,
    config: Config,
    layout: Layout,
    plan: Plan | None = None,
    chosen: Mapping[fx.Node, str] = MappingProxyType({}),
    watch: Watch = SILENT,
) -> tuple[MicrobatchGraph, Plan]:
    """The graph of this rank of `axes`, of one micro-batch, and the plan that it follows.

    names, stored, chosen: of the parameters by their placeholder in the serial graph: names, and
    the states on tp in which they are stored already, and what dp_shard does with those. layout: of
    the data-parallel axes. plan: one to follow. Raises PlanError where it cannot be, and
    ConfigError for a mixture of experts on a mesh with cp and ep.
    """
    mesh = Mesh(tuple(axes), None)
    _refuse(microbatch.local, mesh)
    axis, first = mesh.planned, plan.outer if plan is not None else None
    made, own = plan or Plan(axis.name, axis.size), _parameters(microbatch)
    request = Request(
        axis=axis.name,
        parameters={node: names[parameter] for node, parameter in own.items()},
        stored={node: stored[p] for node, p in own.items() if p in stored},
        sequence_parallel=config.sequence_parallel,
        plan=plan if axis.size > 1 or layout.chooses else None,
        layout=layout,
        chosen={node: chosen[p] for node, p in own.items() if p in chosen},
        training=Training(states=config.optimizer_states, microbatches=microbatch.microbatches),
        even=True,
        ep_exchange=config.ep_exchange,
    )
    decisions: Decisions | None = None
    gathered: frozenset[int] = frozenset()
    if mesh.outer is not None:
        laid = lay_out(microbatch.local, request, mesh, mesh.outer, config, machine, first)
        microbatch = _planned(microbatch, laid.graph, laid.outer.decisions, mesh.outer)
        request, decisions, first = laid.request, laid.decisions, laid.plan
    whole, own = microbatch.local, _parameters(microbatch)
    if axis.size > 1 or layout.chooses:
        decisions = decisions or plan_graph(whole, axis.size, machine, request)
        made = with_graph(plan, decisions, request, whole, axis.size)
        choices = {own[node]: choice for node, choice in decisions.weights.items()}
        microbatch = replace(microbatch, choices=choices)
    if config.memory_budget is not None and is_trained(whole):
        microbatch = _with_plan(microbatch, decisions, axis.size, machine, request)
    if decisions is not None and axis.size > 1:
        gathered = gathered_stacks(whole, decisions.strategies)
        localize = Localize(decisions, config.recompute_collectives)
        local, _ = rank_program(whole, [localize], axis, watch)
        split = {parameter: decisions.stored[node] for node, parameter in own.items()}
        microbatch = replace(_planned(microbatch, local, decisions, axis), split=split)
    if mesh.axis("ep").size > 1 and config.ep_exchange != "weights":
        numbered = enumerate(microbatch.parameters)
        states = {i: data_states(value(node).dim(), mesh.axes) for i, node in numbered}
        experts = ExchangeExperts(mesh.axis("ep"), states, gathered=gathered)
        exchange(microbatch.local, experts, axis)
    return microbatch, replace(made, outer=first)


def _with_plan(
    microbatch: MicrobatchGraph,
    decisions: Decisions | None,
    n: int,
    machine: Machine,
    request: Request,
) -> MicrobatchGraph:
    """The micro-batch with the plan by which stages choose what they keep. Where nobody asked for
    one, on one rank of tp, the values of the graph get their names in it."""
    whole = microbatch.local
    if n > 1:
        assert decisions is not None
        return replace(microbatch, planned=PlannedMicrobatch(whole, decisions, n))
    decisions = decisions or plan_graph(whole, n, machine, replace(request, plan=None))
    graph, made = fx.Graph(), dict[fx.Node, fx.Node]()
    graph.output(graph.graph_copy(whole.graph, made))  # type: ignore[arg-type]
    for node, copy in made.items():
        of_plan = node.op == "call_function" and producer(node)[0] in decisions.strategies
        if of_plan and isinstance(value(node), torch.Tensor):  # several have a name each
            text = value_text((node, forward_value(decisions.state(node))))
            copy.meta["custom"] = {**copy.meta.get("custom", {}), VALUE: text}
    local = fx.GraphModule(whole, graph)
    local.meta = dict(whole.meta)
    return replace(microbatch, local=local, planned=PlannedMicrobatch(whole, decisions, n))


def _refuse(gm: fx.GraphModule, mesh: Mesh) -> None:
    ep, cp = mesh.axis("ep").size, mesh.axis("cp").size
    if ep > 1 and cp > 1 and any(map(is_mixture, gm.graph.nodes)):
        raise ConfigError(
            f"the mesh has pp beside ep={ep} and cp={cp}, and the model has a mixture of "
            "experts, whose rows travel over ep in a pipeline without cp only",
            remedy="Leave cp, ep or pp out: give its ranks to another axis.",
        )


def _parameters(microbatch: MicrobatchGraph) -> dict[fx.Node, fx.Node]:
    """The parameters by their placeholder in the graph of a micro-batch; shared values are behind
    them."""
    placeholders = microbatch.local.graph.find_nodes(op="placeholder")
    return dict(zip(placeholders, microbatch.parameters))


def _planned(
    microbatch: MicrobatchGraph, local: fx.GraphModule, decisions: Decisions, axis: Axis
) -> MicrobatchGraph:
    return replace(
        microbatch,
        local=local,
        shards=[(axis, list(local.meta[OUTPUT_STATES])), *microbatch.shards],
        plan=[*microbatch.plan, *decisions.lines()],
    )
